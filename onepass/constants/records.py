"""The constants of the compiler's models as typed records, one per section of the data file. What each one means is said there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostConstants:
    """Constants of the cost model (plan/cost)."""

    launch_us: float
    sharpness: float
    resident_sharpness: float
    vector_l2_share: float
    reread_all_hits: float
    reread_no_hits: float
    tiles_in_flight_1: float
    tiles_in_flight_2: float
    tiles_in_flight_3: float
    tiles_in_flight_4: float
    one_slot_in_flight: float
    walk_tiles_in_flight: float
    merging_tiles_in_flight: float
    congestion_from: float
    congestion: float
    narrow_read: float
    narrow_read_split: float
    narrow_write: float
    one_line_write: float
    narrow_l2: float
    outstanding_penalty: float
    outstanding_from: float
    outstanding_up_to: float
    outstanding_l2: float
    warp_fold_us: float
    ring_slot_us: float
    row_turnaround_us: float
    merge_turnaround_us: float
    unaligned_edge_us: float
    after_reduction_wait: float
    unpipelined_wait: float
    pipeline_start_us: float
    tma_start_us: float
    unoverlapped_math: float
    tile_us: float
    fill_rate: float
    issue_rate: float
    warps_to_issue: float
    warps_to_issue_unrolled: float
    issue_one_warp: float
    issue_few_warps: float
    issue_few_warps_staged: float
    special_rate: float
    l1_rate: float
    unaligned_slots: float
    unaligned_edge_slots: float
    unaligned_vector_slots: float
    smem_vector_slots: float
    tile_slots: float
    still_tile_slots: float
    several_tiles_slots: float
    merge_slots: float
    reduction_in_warp_us: float
    reduction_us: float
    reduction_warp_us: float
    vector_chunk_us: float
    unaligned_vector_chunk_us: float
    static_rows_penalty: float
    vector_reload_us: float
    cta_exchange_us: float
    unstaged_load_us: float
    extra_copy_us: float
    mailbox_clear_us: float
    slot_refill_us: float
    partials_l2_share: float
    tiles_at_once: float
    further_tile: float
    sm_rate_share: float
    join_part_us: float
    last_block_rate: float
    tie: float


@dataclass(frozen=True, slots=True)
class RegisterConstants:
    """Constants of the register estimate (plan/resources.py)."""

    resident_base: float
    resident_access: float
    resident_live: float
    resident_resident: float
    mix_order_base: float
    mix_order_access: float
    mix_order_live: float
    mix_order_resident: float
    mix_order_accumulated: float
    loop_cols_base: float
    loop_cols_live: float
    loop_rows_base: float
    loop_rows_live: float
    staged_rows_base: float
    staged_rows_access: float
    staged_rows_live: float
    staged_mix_order_base: float
    staged_mix_order_access: float
    staged_mix_order_live: float
    staged_mix_order_resident: float
    staged_mix_order_accumulated: float
    staged_tiles_base: float
    pointwise_base: float
    pointwise_access: float
    pointwise_live: float
    squeeze: float
    first_state: float
    staged_state_share: float
    merged_tile_share: float
    merge_registers: float
    strip_share: float
    entering_share: float
    merged_state_share: float


@dataclass(frozen=True, slots=True)
class FloorConstants:
    """Constants of the floor (plan/cost/floor.py)."""

    start: float
    read_rate: float
    write_rate: float
    held_write_rate: float


@dataclass(frozen=True, slots=True)
class InductorConstants:
    """Constants of the estimate of Inductor's time (plan/inductor_baseline.py)."""

    resident_cols: int
    reread_cols: int
    short: float
    long: float
    moments: float
    exponentials: float
    mixed: float
    unaligned: float
    start_us: float
    split_kernel_us: float
    final_sum_us: float
    results_per_sm: int
    large_ratio: int
    mix_rows: int
    mix_rows_per_col: int
    mix_elements: int
    mix_cols: int


@dataclass(frozen=True, slots=True)
class ClaimConstants:
    """Constants that decide which nodes form a region, which regions are claimed, and what graphs recompute and reuse."""

    equal_ratio: float
    equal_us: float
    small_ratio: int
    shared_data_ratio: int
    region_nodes: int
    fused_nodes: int
    duplicated_nodes: int
    recomputed_ops: int
    recompute_bytes: int
    reuse_bytes: int


@dataclass(frozen=True, slots=True)
class HintConstants:
    """Constants that decide on L2 hints (plan/l2_hints.py)."""

    mark_loads_from: float
    max_load_per_thread: int
    max_row_bytes: int
    narrow_element: int


@dataclass(frozen=True, slots=True)
class Constants:
    """All constants, which belong together: they were fitted on one device."""

    device: str
    cost: CostConstants
    registers: RegisterConstants
    floor: FloorConstants
    inductor: InductorConstants
    claim: ClaimConstants
    hints: HintConstants
