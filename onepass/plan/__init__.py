"""Program -> Plan: what shares a kernel, how each kernel runs, and why not otherwise. Pure arithmetic; needs no GPU."""
