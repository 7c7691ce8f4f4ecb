"""The one table of places where this project differs from a golden file on purpose. A replay may report no other difference.

A replay names the kind of a difference only after it has checked that the difference is exactly of this kind; the table gives the
reason. `cases` are the known cases that show it, so that an entry which nothing shows any more is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Documented:
    """Why we differ, and which golden cases show it."""

    reason: str
    cases: tuple[str, ...] = ()


WHERE_WE_DIFFER: dict[str, Documented] = {
    # Archive ----------------------------------------------------------------------------------------------------------------
    "short_batch": Documented(
        "the reference returns fewer parents than asked for when lineages run out; a step here always has its full grid, filled "
        "up with the best related nodes. The unrelated ones come first and are the reference's, exactly",
        ("siblings_not_blocked", "duplicate_child", "topk_ties", "topk_zero_keeps_all"),
    ),
    "null_value": Documented(
        "a child without a value leaves no trace in the reference; here a rollout is valid with a value or failed, and every "
        "rollout that was submitted is a visit (T = rollouts). n and T are larger by exactly those",
        ("child_value_none",),
    ),
    "empty_archive": Documented(
        "the reference draws fresh seeds when the archive is empty; here seeds are part of the opening commit and never evicted, "
        "so an empty archive is an error"
    ),
    "unstable_argsort": Documented(
        "numpy's default sort broke ties by the processor that ran it; sorts here are stable. The replay follows the recorded "
        "picks and survivors and checks that they are no more than another choice among equal values",
        ("simulation seed 3 (numpy default (AVX-512 host))",),
    ),
    # open-ttt-verl: another algorithm in the same shape ------------------------------------------------------------------------
    "verl_scale": Documented(
        "its scale spans seeds and children, ours children alone once there is one; bonus, score and therefore the pick may differ",
        ("visits_count_groups_not_rollouts", "topk_is_per_event"),
    ),
    "verl_topk_per_event": Documented(
        "it keeps the best children of each expansion, we keep the best of each parent over all its expansions"
    ),
    "verl_seeds_evicted": Documented("its capacity evicts seeds, ours never does", ("seed_evicted_by_cap",)),
    "verl_late_submit": Documented(
        "it ignores a rollout beyond the group's size; here a coordinate is judged once, so there is none", ("late_submit_ignored",)
    ),
    "verl_refused": Documented("it raises where a selected parent was evicted; our plan carries the parent along"),
    # Advantages -----------------------------------------------------------------------------------------------------------------
    "two_rollouts": Documented(
        "with two rewards the KL never reaches ln 2 and the better one gets 1e12, so adaptive advantages of two are refused",
        ("group_of_2_close",),
    ),
    "float32": Documented(
        "a float32 reference: rounding the rewards, magnified by the solved beta, moves its advantages by more than 1e-5. The "
        "float64 reference is the target of this case",
        ("constant64", "half_half_64", "majority_top_64", "tiny_diffs_1e-6"),
    ),
    # Programs -------------------------------------------------------------------------------------------------------------------
    "thinking": Documented(
        "references search the whole text, drafts in the thinking included; here thinking never runs", ("inside_think_only",)
    ),
    "fence_line": Documented(
        "a fence here is a whole line as CommonMark has it: indented by up to three spaces (the block's lines lose that indent), "
        "three or more backticks or tildes, a space before or after the language",
        ("indented_fence",),
    ),
    "block_in_block": Documented(
        "a fence with a language ends the block before it here: an attempt that was never closed, or an answer inside a fence of "
        "another language"
    ),
    # Verifiers ------------------------------------------------------------------------------------------------------------------
    "self_reported": Documented(
        "the original pays the bound that the program reports, if it is near enough; here it is logged and never used, and the "
        "exact value of the function is what counts",
        ("erdos reported_low_by_9e-5",),
    ),
    "point_count": Documented(
        "the references refuse a reported point count that is not the array's; here the count is the array's own and the reported "
        "one is never used",
        ("erdos wrong_n_points",),
    ),
    "erdos_mass": Documented("the references rescale any integral to 1; here one that is off by more than 0.1 % is refused"),
    "erdos_repair": Documented(
        "the references scale h up where its integral falls short, which can leave [0, 1]; here all heights with room move by "
        "the same amount, so h stays inside, and heights within 1e-6 of the range are cut to it"
    ),
    "verifier_size": Documented("the references take any number of points; here an Erdős function has 2 to 20000"),
    "packing_repair": Documented(
        "a violation beyond 1e-12 makes the references refuse; here radii shrink by the exact worst violation, up to 1e-6, "
        "and the packing is worth what is left",
        ("packing overlap_5e-12",),
    ),
    "sequence_negative": Documented(
        "the references cut negative heights to 0 and pay for that; here a sequence with a negative height is refused",
        ("autocorrelation negative_clipped",),
    ),
    "sequence_cap": Documented(
        "the references cut heights to 1000; here heights up to 1e6 count as they are", ("autocorrelation over_1000_clipped",)
    ),
    "sequence_scale": Documented(
        "the references refuse a sum below 0.01; both bounds ignore the scale, so here any sequence that is not zero is scored",
        ("autocorrelation sum_below_0p01",),
    ),
    "types": Documented(
        "the references refuse honest numbers by their Python type (tuple, array, float32, int64); the judge sees the numbers alone"
    ),
}
