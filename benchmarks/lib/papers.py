"""docs/papers.md: what the papers claim whose methods this package has, and what is seen here."""

from __future__ import annotations

from benchmarks.lib.paper_results import (
    Claim,
    as_good,
    at_large_batch,
    clipped,
    exchanged,
    families,
    faster,
    grown,
    lamb_or_adam,
    learned,
    one_bit_adam,
    packed,
    predicted,
    presorted,
    sooner,
    unpadded,
)
from benchmarks.lib.report import table

HEAD = """\
# Papers

What the papers claim whose methods this package has, and what is seen of it here. Our figures are \
from the files in [benchmarks/results](../benchmarks/results), with the machines and dates that \
[benchmarks.md](benchmarks.md) gives; `python -m benchmarks.tables` writes this page.

None of the claims about clusters of hundreds of GPUs has been repeated: no such cluster was at \
hand. *Measured* figures are from small models on CPUs, or from one GPU where it is said; \
*simulated* ones follow the real plans of many ranks with modelled work; *modelled* ones are \
`python -m bert_unpad.plan`'s. A method's formulas are tested against float64 in any case.
"""

MEASURED, SIMULATED, MODELLED = "measured", "simulated", "modelled"
SLOW = "two processes of one core, a link of 200 Mbit/s"
TESTBED = "a ModernBERT of 4 layers of 128 from 33 % masked accuracy on, 300 updates"
NO_CLUSTER = "not tried: no such cluster"
CLUSTER = "python -m benchmarks.cluster"
LEARNS = "python -m benchmarks.convergence"
GROWS = "python -m benchmarks.growth"
GROWN = "a ModernBERT of 4 layers of 128 from fresh weights, 800 updates"
UNPADDED = "Zeng et al., 2022, unpadded BERT, [arXiv:2208.08124](https://arxiv.org/abs/2208.08124)"
BREAKING = (
    "Breaking MLPerf Training, 2024, [arXiv:2402.02447](https://arxiv.org/abs/2402.02447), abstract"
)
ONEBIT_ADAM = "1-bit Adam, [arXiv:2102.02888](https://arxiv.org/abs/2102.02888), abstract"
ONEBIT_LAMB = "1-bit LAMB, [arXiv:2104.06069](https://arxiv.org/abs/2104.06069), abstract"
ZERO_ONE = "0/1 Adam, [arXiv:2202.06009](https://arxiv.org/abs/2202.06009), abstract"
DREAM = "DreamDDP, [arXiv:2502.11058](https://arxiv.org/abs/2502.11058), abstract"
FLOW = "GradientFlow, [arXiv:1902.06855](https://arxiv.org/abs/1902.06855)"
KRELL = "Krell et al., 2021, [arXiv:2107.02027](https://arxiv.org/abs/2107.02027), abstract"
MTDAO = "MT-DAO, [arXiv:2510.05361](https://arxiv.org/abs/2510.05361), abstract"

CLAIMS = (
    Claim(
        UNPADDED + ", abstract",
        "unpadding and grouped attention: first in MLPerf v2.0 on as many GPUs",
        unpadded,
        f"{MEASURED}: a BERT-large step on one H100",
        "python -m benchmarks.model --device cuda",
        "seen against today's unpadded peers on one GPU; eight were not tried",
    ),
    Claim(
        UNPADDED + ", abstract",
        "an exchange of examples balances the ranks and overlaps highly with training",
        exchanged,
        f"{MEASURED}: 4 processes on 2 cores",
        "python -m benchmarks.exchange --seeds 3",
        "seen",
    ),
    Claim(
        BREAKING,
        "BERT to MLPerf's target in 25.1 s (v1.1) and 22.3 s (v2.0) on 1,024 A100s",
        predicted("1,024 a100"),
        f"{MODELLED}: other entries of these rounds on as many GPUs",
        "python -m benchmarks.check_published",
        NO_CLUSTER,
    ),
    Claim(
        BREAKING,
        "presorting by strata on each rank balances the work without moving data",
        presorted,
        f"{SIMULATED}: 4,096 ranks of 4 sequences",
        "python -m bert_unpad.simulate",
        "seen",
    ),
    Claim(
        BREAKING,
        "clipping by bucket before the allreduce is as fast as none, because it overlaps",
        clipped,
        f"{MEASURED}: {SLOW}",
        CLUSTER + " --name clipping",
        "seen",
    ),
    Claim(
        BREAKING,
        "a model clipped by bucket learns as well",
        learned(
            "bucket, adaptive",
            "bucket, equal",
            "bucket, adaptive, half clipped",
            "bucket, equal, half clipped",
            "bucket, adaptive, small, half clipped",
            "bucket, equal, small, half clipped",
        ),
        f"{MEASURED}: {TESTBED}",
        LEARNS,
        as_good("bucket, adaptive"),
    ),
    Claim(
        BREAKING,
        "tuned Adam allows larger batches than LAMB",
        at_large_batch,
        f"{MEASURED}: a BERT of 2 layers of 128",
        "python -m benchmarks.tune",
        lamb_or_adam,
    ),
    Claim(
        KRELL,
        "packing makes BERT's second phase of pretraining twice as fast",
        packed,
        f"{MEASURED}: steps of a BERT of 4 layers of 256, a thread of a CPU",
        "python -m benchmarks.packing",
        "seen against padding; unpadding is faster still",
    ),
    Claim(
        KRELL,
        "packed models are mathematically equivalent, and train with the same practices",
        learned("packed rows"),
        f"{MEASURED}: {TESTBED}, as many tokens in an update",
        LEARNS,
        as_good("packed rows"),
    ),
    Claim(
        ONEBIT_ADAM,
        "up to 5 times less volume in all, up to 3.3 times the throughput on 256 GPUs",
        faster("1-bit Adam"),
        f"{MEASURED} after the warm-up: {SLOW}",
        CLUSTER,
        "seen in kind: the volume of a whole run depends on its warm-up",
    ),
    Claim(
        ONEBIT_ADAM,
        "converges as fast as Adam",
        learned(
            "1-bit Adam",
            "1-bit Adam, scale tensor",
            "1-bit Adam, scale row",
            "1-bit Adam, scale element",
        ),
        f"{MEASURED}: {TESTBED}",
        LEARNS,
        one_bit_adam,
    ),
    Claim(
        ONEBIT_LAMB,
        "up to 4.6 times less volume, up to 2.8 times the speed on 256 GPUs",
        faster("1-bit LAMB"),
        f"{MEASURED} after the warm-up: {SLOW}",
        CLUSTER,
        "seen in kind",
    ),
    Claim(
        ONEBIT_LAMB,
        "converges as fast as LAMB",
        learned("1-bit LAMB", "1-bit LAMB, scale element"),
        f"{MEASURED}: {TESTBED}, at another learning rate than the AdamW beside it",
        LEARNS,
        "not decided: LAMB itself was not run on two ranks",
    ),
    Claim(
        ZERO_ONE,
        "up to 87 % less volume, 54 % fewer rounds, twice the throughput of 1-bit Adam on 128 GPUs",
        faster("0/1 Adam", "1-bit Adam"),
        f"{MEASURED}, without local steps yet: {SLOW}",
        CLUSTER,
        "**not seen**: fewer rounds need runs that are long enough for local steps",
    ),
    Claim(
        ZERO_ONE,
        "converges as fast as Adam",
        learned("0/1 Adam", "0/1 Adam, scale element", "0/1 Adam, local steps"),
        f"{MEASURED}: {TESTBED}; local steps of up to 8",
        LEARNS,
        as_good("0/1 Adam, local steps"),
    ),
    Claim(
        DREAM,
        "1.49 to 3.91 times the speed of leading baselines on 32 GPUs",
        faster("DreamDDP", "local SGD"),
        f"{MEASURED}: {SLOW}, both with a period of 8",
        CLUSTER,
        "a smaller gain is seen",
    ),
    Claim(
        DREAM,
        "converges as fast as SGD that averages in every step",
        learned("DreamDDP", "local SGD"),
        f"{MEASURED}: {TESTBED}, a period of 8",
        LEARNS,
        as_good("DreamDDP"),
    ),
    Claim(
        FLOW + ", title",
        "AlexNet on ImageNet in 1.5 minutes on 512 GPUs",
        faster("GradientFlow"),
        f"{MEASURED}: {SLOW}",
        CLUSTER,
        NO_CLUSTER,
    ),
    Claim(
        FLOW,
        "sending only the chunks with the largest gradients keeps the accuracy",
        learned("GradientFlow"),
        f"{MEASURED}: {TESTBED}, a tenth of the chunks",
        LEARNS,
        as_good("GradientFlow"),
    ),
    Claim(
        MTDAO,
        "6 to 27 % less time than DDP on Ethernet",
        faster("MT-DAO"),
        f"{MEASURED}, averages every 8 updates: {SLOW}",
        CLUSTER,
        "seen, on a slower link",
    ),
    Claim(
        MTDAO,
        "no gap to DDP",
        learned("MT-DAO"),
        f"{MEASURED}: {TESTBED}, averages every 8 updates",
        LEARNS,
        as_good("MT-DAO"),
    ),
    Claim(
        "LANS, [arXiv:2006.13484](https://arxiv.org/abs/2006.13484), abstract",
        "batches of 96K and 33K, BERT in 54 minutes on 192 instances of 8 GPUs",
        learned("LANS", "LAMB"),
        f"{MEASURED}: {TESTBED}, a batch of 16, beside AdamW",
        LEARNS,
        NO_CLUSTER,
    ),
    Claim(
        "MERIT, [arXiv:2508.20577](https://arxiv.org/abs/2508.20577), abstract",
        "GPT-2 medium at a batch of 6K without loss",
        learned("MERIT"),
        f"{MEASURED}: {TESTBED}, a batch of 16, beside AdamW",
        LEARNS,
        "not tried at a large batch",
    ),
    Claim(
        "CAME, [arXiv:2307.02047](https://arxiv.org/abs/2307.02047), abstract",
        "BERT at a batch of 32,768: faster and more accurate than Adam",
        learned("CAME"),
        f"{MEASURED}: {TESTBED}, a batch of 16, beside AdamW; pytorch_optimizer's class",
        LEARNS,
        "not tried at a large batch",
    ),
    Claim(
        "ALBERT, [arXiv:1909.11942](https://arxiv.org/abs/1909.11942), section 1",
        "18 times fewer parameters than BERT-large, 1.7 times as fast",
        families,
        f"{MEASURED}: 4 layers of 128",
        "python -m benchmarks.families",
        "fewer parameters seen; at equal compute it learns **less** here",
    ),
    Claim(
        "Layer dropping, [arXiv:2010.13369](https://arxiv.org/abs/2010.13369), abstract",
        "24 % less time a sample, BERT 2.5 times as fast to the same accuracy",
        grown("layer drop"),
        f"{MEASURED}: {GROWN}; whole layers, not their halves as in the paper",
        GROWS,
        sooner("layer drop"),
    ),
    Claim(
        "Progressive stacking, Gong et al., ICML 2019, abstract",
        "as good as training from scratch, much faster",
        grown("stacking"),
        f"{MEASURED}: {GROWN}",
        GROWS,
        sooner("stacking"),
    ),
    Claim(
        "MSLT, [arXiv:2011.13635](https://arxiv.org/abs/2011.13635), abstract",
        "more than 110 % faster without significant loss",
        grown("mslt"),
        f"{MEASURED}: {GROWN}",
        GROWS,
        sooner("mslt"),
    ),
    Claim(
        "Multi-node BERT, [arXiv:2008.00177](https://arxiv.org/abs/2008.00177), abstract",
        "BERT in 12 days on an academic cluster, by 16 bits, overlap and fewer syncs",
        faster("+ bf16"),
        f"{MEASURED}: {SLOW}",
        CLUSTER,
        NO_CLUSTER,
    ),
)


def page() -> str:
    """The text of docs/papers.md."""
    rows = []
    for claim in CLAIMS:
        verdict = claim.verdict if isinstance(claim.verdict, str) else claim.verdict()
        row = [claim.paper, claim.says, claim.ours() or "not run yet", claim.scale]
        rows.append([*row, verdict, f"`{claim.command}`"])
    header = ["paper", "claim", "here", "how", "seen?", "command"]
    return f"{HEAD}\n{table(header, rows, text_columns=len(header))}\n"
