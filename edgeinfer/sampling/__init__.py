"""Sampling, from logits to the next token: one sampler chain in fixed order, `chain.CHAIN`.

The order is that of llama.cpp's default chain, so that settings carry over. Mirostat 2 replaces all steps
after the penalties. A temperature of 0 takes the highest logit after bias, penalties and DRY, the lowest id
among equals. `docs/user/sampling.md` describes each setting.
"""

from edgeinfer.options import SamplingParams
from edgeinfer.sampling.candidates import logprobs
from edgeinfer.sampling.sampler import Sampler, SamplerState

__all__ = ["Sampler", "SamplerState", "SamplingParams", "logprobs"]
