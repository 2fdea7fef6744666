"""Sampling, from logits to the next token: one sampler chain in fixed order.

The order is that of llama.cpp's default chain, so that settings carry over:

1. logit bias
2. repetition, presence and frequency penalties
3. DRY, which penalizes the token that would extend a repetition
4. top-k
5. locally typical
6. top-p
7. min-p
8. XTC, which excludes the most probable tokens with some probability
9. temperature
10. sampling

Mirostat 2 replaces steps 4 to 8 and runs after the temperature; bias and penalties stay. A temperature of 0
takes the highest logit after steps 1 to 3, the lowest id among equals. `docs/sampling.md` describes each
setting.
"""

from edgeinfer.sampling.logprobs import logprobs
from edgeinfer.sampling.sampler import Sampler, SamplerState
from edgeinfer.sampling.settings import SamplerSettings

__all__ = ["Sampler", "SamplerSettings", "SamplerState", "logprobs"]
