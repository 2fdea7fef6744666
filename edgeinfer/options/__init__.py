"""Options of loading, sampling and completions: one dataclass each, one field an option.

Python keywords, flags of the command line, keys of the settings file, environment variables and the server's
fields derive from the fields (`option_field.py`).
"""

from edgeinfer.options.load_options import EndpointKeywords, LoadKeywords, LoadOptions
from edgeinfer.options.run_options import ChatKeywords, GenerateKeywords, RunKeywords, RunOptions
from edgeinfer.options.sampling_params import SamplingKeywords, SamplingParams

__all__ = [
    "ChatKeywords",
    "EndpointKeywords",
    "GenerateKeywords",
    "LoadKeywords",
    "LoadOptions",
    "RunKeywords",
    "RunOptions",
    "SamplingKeywords",
    "SamplingParams",
]
