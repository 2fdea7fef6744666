"""The random models of the tests: Mamba, Mamba-2, Falcon-H1, Jamba and RWKV-7."""

from tests.random_hybrids import mamba_layers, rwkv7, selective_scan
from tests.random_models import RandomModel

RECURRENT_ZOO: dict[str, RandomModel] = {
    "mamba": RandomModel("mamba", hybrid=selective_scan("mmm", 16, 32)),
    "mamba-normed": RandomModel("mamba", tied=True, hybrid=selective_scan("mmm", 24, 64, normed=True)),
    "rwkv7": RandomModel("rwkv7", width=128, hybrid=rwkv7(64, (32, 32, 32, 64))),
    "jamba": RandomModel("jamba", hybrid=selective_scan("mam", 16, 32)),
    "jamba-moe": RandomModel(
        "jamba",
        layers=4,
        experts=8,
        experts_per_token=2,
        hybrid=selective_scan("mmam", 16, 32, routed=(1, 3)),
    ),
    "mamba2": RandomModel("mamba2", layers=2, hybrid=mamba_layers("mm", 4, 32, 16)),
    "mamba2-groups": RandomModel(
        "mamba2", layers=2, tied=True, hybrid=mamba_layers("mm", 6, 16, 48, groups=3)
    ),
    "falcon-h1": RandomModel("falcon-h1", hybrid=mamba_layers("ppp", 4, 32, 32, normed=False)),
    "falcon-h1-groups": RandomModel(
        "falcon-h1", layers=2, tied=True, head_dim=32, hybrid=mamba_layers("pp", 6, 16, 48, groups=3)
    ),
}
