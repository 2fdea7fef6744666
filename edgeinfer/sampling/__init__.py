"""From logits to the next token: one chain of samplers, in one fixed order.

The order is that of llama.cpp's default chain, so that settings carry over:

1. logit bias
2. repetition, presence and frequency penalties
3. DRY, which penalizes the token that would extend a repetition
4. top-k
5. locally typical
6. top-p
7. min-p
8. XTC, which leaves out the most probable tokens now and then
9. temperature
10. one draw

Mirostat 2 takes the place of steps 4 to 8 and works after the temperature; bias and penalties stay.
A temperature of 0 takes the highest logit after steps 1 to 3, the lowest id among equals.
`docs/sampling.md` says what each setting means.
"""

from edgeinfer.sampling.logprobs import logprobs
from edgeinfer.sampling.sampler import Sampler, SamplerState
from edgeinfer.sampling.settings import SamplerSettings

__all__ = ["Sampler", "SamplerSettings", "SamplerState", "logprobs"]
