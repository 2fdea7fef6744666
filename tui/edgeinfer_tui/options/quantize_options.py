"""The options of `quantize`, in the panels that `--help` shows."""

from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Option

FORMATS = "Formats"
GOALS = "A goal instead of a type"
WORK = "Conversion"
HELP = """Store a model's weights in fewer bits: a smaller file that runs faster with slightly lower quality.

OUT is written completely or not at all: Ctrl-C or a full disk leaves no file.

[bold]Types, bits per weight[/]   (a mix uses more bits for some tensors)

  Q8_0 8.5 · Q6_K 6.6      almost no loss

  Q5_K_M Q5_K_S 5.5 · [bold]Q4_K_M[/] Q4_K_S 4.5      small loss; start here

  IQ4_XS 4.25 · IQ4_NL 4.5      a little smaller than Q4_K_S, slower on some machines

  Q3_K_L Q3_K_M Q3_K_S 3.4 · Q2_K Q2_K_S 2.6      for models that would not fit otherwise

  IQ3_M IQ3_S IQ3_XS 3.4 · IQ3_XXS 3.1      better than Q3_K at equal size; with --imatrix

  IQ2_M 2.6 · IQ2_S IQ2_XS 2.3 · IQ2_XXS 2.1      only with --imatrix

  IQ1_M 1.8 · IQ1_S 1.6      only with --imatrix, for the largest models

  Q4_0 4.5 · Q4_1 5 · Q5_0 5.5 · Q5_1 6      older and simpler

  MXFP4_MOE 4.25 · TQ2_0 2.1 · TQ1_0 1.7 · Q1_0 1.1      only for models that were trained for them

  F32 · F16 · BF16      conversions

[bold]Examples[/]

  edgeinfer quantize model-F16.gguf model-Q4_K_M.gguf

  edgeinfer quantize model-F16.gguf --type Q3_K_M --dry-run

  edgeinfer quantize model-F16.gguf small.gguf --type IQ4_XS --imatrix imatrix.gguf

  edgeinfer quantize model-BF16.gguf out.gguf --type Q5_K_M --tensor 'ffn_down=Q6_K' --output-type Q8_0

  edgeinfer quantize model-F16.gguf out.gguf --fit 6GiB --calibrate book.txt
"""

CONVERT_HELP = """Write a Hugging Face folder as one GGUF file, which llama.cpp reads too.

FOLDER has config.json, tokenizer.json and safetensors: weights in BF16, F16, F32,
FP8, GPTQ, AWQ or compressed-tensors. Without --type each keeps its format:
4 bits become Q4_0 or Q4_1 with the same codes, FP8 becomes F16.
OUT is written completely or not at all. A folder also runs as it is.

[bold]Examples[/]

  edgeinfer convert ./Qwen3-8B qwen3-8b-BF16.gguf

  edgeinfer convert ./Qwen3-8B qwen3-8b-Q4_K_M.gguf --type Q4_K_M
"""

Folder = Annotated[str, Argument(metavar="FOLDER", help="The folder with config.json and safetensors.")]
ConvertedType = Annotated[
    str | None,
    Option(
        "--type",
        help="The mix of formats, as for edgeinfer quantize. [dim](the formats of the folder)[/]",
        rich_help_panel=FORMATS,
    ),
]
Source = Annotated[
    str, Argument(metavar="IN", help="The F32, F16 or BF16 .gguf file, or a name from `edgeinfer list`.")
]
Target = Annotated[
    Path | None, Argument(metavar="OUT", help="The .gguf file to write. [dim]Not needed for --dry-run[/]")
]
TypeName = Annotated[
    str | None,
    Option(
        "--type",
        help="The mix of formats; listed above. [dim](Q4_K_M; with --hot-first the file's own)[/]",
        rich_help_panel=FORMATS,
    ),
]
HotFirst = Annotated[
    bool,
    Option(
        "--hot-first",
        help="Neurons in the order of the model's profile (edgeinfer profile), the hottest first.",
        rich_help_panel=FORMATS,
    ),
]
Bundle = Annotated[
    bool,
    Option(
        "--bundle",
        help="Also write OUT.bundles, from which active neurons of a ReLU model are read if memory is too "
        "small for it; without OUT only that of IN.",
        rich_help_panel=FORMATS,
    ),
]
Imatrix = Annotated[
    Path | None,
    Option(
        "--imatrix",
        metavar="FILE",
        help="An importance matrix, GGUF or .dat: columns that matter more get the smaller error.",
        rich_help_panel=FORMATS,
    ),
]
Fit = Annotated[
    str | None,
    Option(
        "--fit",
        metavar="SIZE",
        help="The best file of at most this size, as 6GiB: the type of each tensor is selected by what it "
        "does to the outputs. That is measured once, in minutes to hours; Ctrl-C keeps what is measured.",
        rich_help_panel=GOALS,
    ),
]
BitsPerWeight = Annotated[
    float | None,
    Option("--bpw", metavar="BITS", help="The same with bits per weight, as 4.25.", rich_help_panel=GOALS),
]
TokensPerSecond = Annotated[
    float | None,
    Option(
        "--tokens-per-second",
        metavar="N",
        help="The same with a decoding speed of this machine, by the rates of edgeinfer plan.",
        rich_help_panel=GOALS,
    ),
]
Text = Annotated[
    Path | None,
    Option(
        "--text",
        metavar="FILE",
        help="The text in UTF-8 to measure on. [dim]Text that the model generates if left out[/]",
        exists=True,
        dir_okay=False,
        rich_help_panel=GOALS,
    ),
]
Calibrate = Annotated[
    Path | None,
    Option(
        "--calibrate",
        metavar="TEXT",
        help="Round by what the inputs on this text in UTF-8 are (GPTQ): the same types and bytes, a smaller "
        "loss. Takes minutes to hours; Ctrl-C leaves OUT.partial, with which the same command resumes.",
        exists=True,
        dir_okay=False,
        rich_help_panel=FORMATS,
    ),
]
TensorTypes = Annotated[
    list[str] | None,
    Option(
        "--tensor",
        metavar="PATTERN=TYPE",
        help="Another type for tensors whose name the regular expression matches. May be repeated; "
        "the first match counts.",
        rich_help_panel=FORMATS,
    ),
]
OutputType = Annotated[
    str | None,
    Option("--output-type", metavar="TYPE", help="For the output matrix.", rich_help_panel=FORMATS),
]
EmbeddingType = Annotated[
    str | None,
    Option("--embedding-type", metavar="TYPE", help="For token embeddings.", rich_help_panel=FORMATS),
]
Pure = Annotated[bool, Option("--pure", help="One type for all tensors, no mix.", rich_help_panel=FORMATS)]
AllowRequantize = Annotated[
    bool,
    Option(
        "--allow-requantize",
        help="Take tensors that are quantized already; worse than from F16.",
        rich_help_panel=WORK,
    ),
]
Force = Annotated[bool, Option("--force", help="Replace OUT if it is there.", rich_help_panel=WORK)]
DryRun = Annotated[
    bool, Option("--dry-run", help="Only print what each tensor would become.", rich_help_panel=WORK)
]
AsJson = Annotated[bool, Option("--json", help="Print JSON for a program to read.", rich_help_panel=WORK)]


def overrides(given: list[str]) -> dict[str, str]:
    """`PATTERN=TYPE` as pattern -> type; a pattern may contain `=`."""
    pairs: dict[str, str] = {}
    for text in given:
        pattern, sign, name = text.rpartition("=")
        if not (pattern and sign and name):
            raise BadParameter(f"--tensor: saw {text!r}, wanted PATTERN=TYPE, as ffn_down=Q6_K")
        pairs.setdefault(pattern, name)
    return pairs
