"""A plan in words, for the start-up report."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxdiffusion.attention.plan import AttentionPlan


def waste(padded: int, real: int) -> str:
    """How much of a padded size is padding."""
    return f"{padded} for {real} ({(padded - real) / padded:.1%} padding)"


def _reason(plan: "AttentionPlan") -> str:
    """What runs in place of the name, or that it runs all the same, and why."""
    if not plan.note:
        return ""
    return f" runs as {plan.runs}: {plan.note}" if plan.runs != plan.name else f": {plan.note}"


def describe_plan(plan: "AttentionPlan") -> str:
    """What runs, and what it costs, a line each."""
    geometry, problem = plan.geometry, plan.problem
    sizes = plan.exchange.kernel_sizes(geometry)
    heads = " + ".join(str(sizes.batch * heads) for heads in sizes.heads)
    moved = plan.exchange.bytes_sent(geometry)
    lines = [
        f"attention {plan.name}" + _reason(plan),
        f"exchange: {plan.exchange.title()}; {moved / 2**20:.2f} MiB sent per device",
        f"kernel: {plan.kernel.title}, {plan.kernel.softmax} softmax; {heads} (batch, head) pairs "
        f"x {sizes.q_len} queries x {sizes.kv_len} keys a call",
        *plan.kernel.details(),
        "norm and rotation: in the pass that moves heads to their places" if plan.fused else "",
        f"queries: {waste(plan.padded_q_len, problem.q_len)}; "
        f"keys: {waste(plan.padded_kv_len, problem.kv_len)}",
        plan.exchange.waste(geometry),
        ""
        if problem.heads_per_key_head == 1
        else f"key heads: {problem.key_heads}, each repeated for {problem.heads_per_key_head} "
        "query heads before the exchange",
        "" if plan.kernel.differentiable else "forward only: this kernel has no gradient",
    ]
    return "\n  ".join(line for line in lines if line)
