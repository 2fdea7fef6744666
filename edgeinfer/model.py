"""A loaded model: prompts in, completions out."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

import numpy as np
import numpy.typing as npt

from edgeinfer.chat import Chat
from edgeinfer.chat_templates.chat_format import ChatFormat
from edgeinfer.chat_templates.template_options import DEFAULTS, TemplateOptions, Thinking, thinking_levels
from edgeinfer.embedding import (
    Pooling,
    TextVectors,
    check_pooling,
    checked_texts,
    normalized,
    pooled,
    text_rows,
)
from edgeinfer.engine.encoder_engine import EncoderEngine
from edgeinfer.engine.guards import ModelLock
from edgeinfer.engine.protocols import Engine, TextTokenizer
from edgeinfer.errors import Detail, EdgeInferError, SettingError, shown
from edgeinfer.generation.batching.completions import Completer, whole
from edgeinfer.generation.context_shift import SINKS, ContextShift
from edgeinfer.generation.local_chat import LocalChatEngine
from edgeinfer.generation.request import Prompt, Prompts, Request, request_of, several_prompts
from edgeinfer.generation.sequence_counts import SequenceCounts, one_completion
from edgeinfer.generation.token_stream import TokenStream
from edgeinfer.lora.control import LoraControl
from edgeinfer.model_config.pooling_head import PoolingHead
from edgeinfer.options import ChatKeywords, GenerateKeywords, RunKeywords, RunOptions, SamplingParams
from edgeinfer.options.lora_option import GivenLora, LoraChoice, lora_choices
from edgeinfer.options.run_options import run_options
from edgeinfer.prompt_encoding import PromptEncoding
from edgeinfer.ranking import RankedText, Ranker, Ranking, checked_query, ranked
from edgeinfer.results import Generation
from edgeinfer.snapshots.engine_snapshots import EngineSnapshots
from edgeinfer.snapshots.store import SnapshotStore
from edgeinfer.speculation.drafter import Drafter
from edgeinfer.speculation.speculator import Speculator
from edgeinfer.structured.constraint import Grammars
from edgeinfer_offload.planner.memory_plan import MemoryPlan

if TYPE_CHECKING:
    from edgeinfer.generation.async_stream import AsyncTokenStream

Result = TypeVar("Result")


class Model:
    """What `edgeinfer.load` returns; a context manager. Thread-safe.

    `warnings`: lines from loading about problems; `details`: lines about how the model runs. `spare_core`:
    the engine leaves one core idle while it computes. `batch_invariant`: as for `decode_for`. `sampling`:
    defaults of the sampling parameters, by name; they come from the model registry.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        tokenizer: TextTokenizer,
        chat_format: ChatFormat | None,
        plan: Callable[[], MemoryPlan] | None = None,
        prompt_style: Literal["raw", "chat"] | None = None,
        warnings: Sequence[str] = (),
        on_close: Callable[[], None] | None = None,
        drafter: Drafter | None = None,
        pooling: Pooling = "mean",
        pooling_head: PoolingHead | None = None,
        ranker: Ranker | None = None,
        snapshots: SnapshotStore | None = None,
        spare_core: bool = False,
        batch_invariant: bool = False,
        template_options: TemplateOptions = DEFAULTS,
        sampling: Mapping[str, Any] | None = None,
        gpu: int | None = None,
        adapters: LoraControl | None = None,
    ) -> None:
        self.name = name
        self.engine = engine
        self.tokenizer = tokenizer
        self.chat_format = chat_format
        self._encoding = PromptEncoding(
            name, tokenizer, chat_format, engine.vocabulary_size, template_options
        )
        self._plan = plan
        self.gpu = gpu
        """Index of the GPU that it uses; None: it is on the CPU only, or llama.cpp's."""
        self.prompt_style = prompt_style
        self.sampling = dict(sampling or {})
        self.warnings = tuple(line for line in warnings if not isinstance(line, Detail))
        self.details = tuple(line for line in warnings if isinstance(line, Detail))
        self._on_close = on_close
        self.speculator = Speculator(engine, drafter) if drafter else None
        self.pooling = pooling
        self.pooling_head = pooling_head or PoolingHead()
        self._ranker = ranker
        self.is_encoder = isinstance(engine, EncoderEngine)
        """Whether it has embeddings only, and no completions."""
        self._snapshots = EngineSnapshots(engine, snapshots) if snapshots else None
        self._grammars = Grammars(tokenizer, engine.vocabulary_size, spare_core)
        self._adapters = adapters
        self._lock = ModelLock()
        self.completer = Completer(engine, tokenizer, self._lock, batch_invariant)
        self._closed = False

    def __repr__(self) -> str:
        kind = "encoder" if self.is_encoder else "model"
        state = "closed" if self._closed else f"context {self.context}"
        read = f"{self.engine.bytes_per_token / 1e6:,.1f} MB read per token"
        return f"<edgeinfer {kind} {self.name}: {state}, {read}>"

    @cached_property
    def plan(self) -> MemoryPlan | None:
        """The memory plan: bytes per device and the cost of reading them; None if another engine places
        them.
        """
        return self._plan() if self._plan else None

    @property
    def context(self) -> int:
        """Maximum tokens of prompt and completion together."""
        return self.engine.context

    @property
    def parallel(self) -> int:
        """Number of requests with the whole context whose caches it holds at once."""
        return self.engine.parallel

    @cached_property
    def thinking_levels(self) -> tuple[Thinking, ...]:
        """The values of `thinking` that its chat template supports."""
        return thinking_levels(self.chat_format.variables()) if self.chat_format else ()

    @overload
    def generate(
        self, prompt: Prompt, *, n: int, **options: Unpack[GenerateKeywords]
    ) -> list[Generation]: ...

    @overload
    def generate(
        self, prompt: Prompts, *, n: None = None, **options: Unpack[GenerateKeywords]
    ) -> list[Generation]: ...

    @overload
    def generate(
        self, prompt: Prompt, *, n: None = None, **options: Unpack[GenerateKeywords]
    ) -> Generation: ...

    def generate(
        self, prompt: Prompt | Prompts, *, n: int | None = None, **options: Unpack[GenerateKeywords]
    ) -> Generation | list[Generation]:
        """Return the completion of a prompt, or a list: of several prompts, which advance together, or `n`
        completions of one. `Raises` and `options`: as for `stream`, with those of `RunOptions` for several.
        """
        if (prompts := several_prompts(prompt)) is not None:
            settings: Any = one_completion({**options, "n": n})
            return [*map(whole, self.generate_each(prompts, **settings))]
        run, sampling = run_options({**self.sampling, **options, "n": n}, without=())
        if run.n is None and run.best_of is None and run.beams is None:
            return self._stream(prompt, run, sampling).read()  # type: ignore[arg-type]
        completions = self._several(prompt, run, sampling)  # type: ignore[arg-type]
        return completions[0] if n is None else completions

    def generate_each(
        self, prompts: Sequence[Prompt], **options: Unpack[RunKeywords]
    ) -> Iterator[Generation | Exception]:
        """The completion of each prompt, in order, or the error that `generate` would raise for it. All
        advance together, in batches on the CPU. Closing the iterator cancels the others.
        """
        run, sampling = run_options({**self.sampling, **options})
        self.refuse_encoder()
        self._refuse_closed()

        def request(prompt: Prompt) -> Request:
            return self._request(
                self._encoding.of_prompt(prompt, run.raw, run.template_options), run, sampling
            )

        return self.completer.each(request, prompts, self.speculator)

    def _several(self, prompt: Prompt, run: RunOptions, sampling: SamplingParams) -> list[Generation]:
        self.refuse_encoder()
        ids = self._encoding.of_prompt(prompt, run.raw, run.template_options)
        self._refuse_closed()
        return SequenceCounts(run.n, run.best_of, run.beams).completions(
            self._request(ids, run, sampling),
            lambda: self._grammars.constraint(run.schema, run.grammar),
            lambda requests: [*map(whole, self.completer.together(requests, self.speculator))],
            self.completer.by_beams,
        )

    def stream(self, prompt: Prompt, **options: Unpack[RunKeywords]) -> TokenStream:
        """Stream the completion of a prompt.

        `prompt`: a text, token ids used unchanged, or the messages of a chat ({"role": …, "content": …}),
        with the `tools` for its template (`parse_tool_calls` parses their calls in the response). `options`:
        the fields of `edgeinfer.options.RunOptions` and `SamplingParams`, which describe them.

        Raises:
            SettingError: an option or token id out of its range, `raw` False without a chat template, or an
                unsatisfiable schema.
            ChatTemplateError: the chat template fails.
            EdgeInferError: the model has been closed.
            ContextOverflowError: the prompt is longer than the context; raised by the first token.
        """
        return self._stream(prompt, *run_options({**self.sampling, **options}))

    def _stream(self, prompt: Prompt, run: RunOptions, sampling: SamplingParams) -> TokenStream:
        self.refuse_encoder()
        ids = self._encoding.of_prompt(prompt, run.raw, run.template_options)
        return self._stream_ids(ids, run, sampling)

    def prompt_ids(self, prompt: Prompt, **options: Unpack[RunKeywords]) -> list[int]:
        """The token ids that `stream` reads for a prompt; options and `Raises` as there."""
        run, _ = run_options({**self.sampling, **options})
        return self._encoding.of_prompt(prompt, run.raw, run.template_options)

    def stream_async(self, prompt: Prompt, **options: Unpack[RunKeywords]) -> "AsyncTokenStream":
        """`stream` for `async for`; options and `Raises` as there."""
        from edgeinfer.generation.async_stream import AsyncTokenStream

        return AsyncTokenStream(self.stream(prompt, **options), self.completer.step_thread)

    async def generate_async(self, prompt: Prompt, **options: Unpack[RunKeywords]) -> Generation:
        """`generate` for `await`; cancelling the task ends generation."""
        stream = self.stream_async(prompt, **options)
        async for _ in stream:
            pass
        return stream.result

    def _stream_ids(
        self,
        ids: list[int],
        run: RunOptions,
        sampling: SamplingParams,
        *,
        keep: int = SINKS,
        dropped_messages: int = 0,
        on_end: Callable[[Generation], None] | None = None,
    ) -> TokenStream:
        """Stream the completion of token ids. `keep`: first tokens that a context shift keeps."""
        self._refuse_closed()
        request = self._request(ids, run, sampling, keep, dropped_messages)
        return self.completer.stream(request, self.speculator, on_end)

    def _request(
        self, ids: list[int], run: RunOptions, sampling: SamplingParams, keep: int = SINKS, dropped: int = 0
    ) -> Request:
        return request_of(
            ids,
            run,
            sampling,
            dropped_messages=dropped,
            context_shift=ContextShift.requested(run.context_overflow, keep, self.engine),
            constraint=self._grammars.constraint(run.schema, run.grammar),
            restore=self._restore if self._snapshots else None,
        )

    def _restore(self, ids: list[int], held: int) -> int:
        """As `EngineSnapshots.restore`, from those of the adapters that are in use now."""
        assert self._snapshots is not None
        return self._snapshots.restore(ids, held)

    def refuse_encoder(self) -> None:
        """Raises `SettingError`: the model completes no text."""
        if self.is_encoder:
            raise SettingError(f"{self.name} is an encoder, which completes no text: use embed")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EdgeInferError(f"{self.name} has been closed; load it again")

    def chat(self, system: str | None = None, **options: Unpack[ChatKeywords]) -> Chat:
        """Start a chat; `options` are defaults for all its responses, as for `stream`."""
        self.refuse_encoder()
        engine = LocalChatEngine(self._encoding.of_chat, self._stream_ids, self._decode_all, self.context)
        defaults: Any = self.sampling
        return Chat(engine, system, **{**defaults, **options})

    def _decode_all(self, ids: Sequence[int]) -> str:
        """The text of ids, with the control tokens."""
        return self.tokenizer.decode(ids, special=True)

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits (len(ids), vocabulary) float32 after each token of `ids`, computed from an empty context.

        Raises:
            SettingError: no ids, or an id that is not in the vocabulary.
            ContextOverflowError: more ids than the context holds.
            EdgeInferError: the model has been closed.
        """
        self.refuse_encoder()
        taken = self._encoding.of_ids(ids, "ids")
        if not taken:
            raise SettingError("ids: saw none, wanted at least one token id")
        return self._run_from_empty_cache(taken, self.engine.append_all)

    def embed(
        self, texts: str | Sequence[str], pooling: str | None = None, normalize: bool = True
    ) -> npt.NDArray[np.float32]:
        """Embeddings (len(texts), hidden_size) float32 of texts; of one text (hidden_size,).

        `pooling`: "mean" of the hidden states before the output head, that of the first token ("cls") or of
        the "last"; None: as the file specifies, else the mean. `normalize`: scale vectors to length 1.

        Raises:
            SettingError: no text, an empty one, or an unknown pooling.
            ContextOverflowError: a text has more tokens than the context holds.
            EdgeInferError: the model has been closed, or its engine gives no vectors.
        """
        if isinstance(texts, str):
            vector: npt.NDArray[np.float32] = self.embed([texts], pooling, normalize)[0]
            return vector
        return self.text_vectors(texts, pooling, normalize).vectors

    def text_vectors(
        self, texts: Sequence[str], pooling: str | None = None, normalize: bool = True
    ) -> TextVectors:
        """As `embed`, with the number of tokens processed."""
        selected = self.pooling if pooling is None else check_pooling(pooling)
        if not isinstance(normalize, bool):
            raise SettingError(f"normalize: saw {shown(normalize)}, wanted True or False")
        ids = [self._encoding.of_whole_text(text) for text in checked_texts(texts)]
        if not all(ids):
            raise SettingError("embed: saw an empty text, wanted one with at least one token")
        if not ids:
            return TextVectors(np.zeros((0, 0), np.float32), 0)
        of_texts = self._pooled(ids, lambda rows: pooled(rows, selected))
        vectors = self.pooling_head.embedding(np.stack(of_texts))
        return TextVectors(normalized(vectors) if normalize else vectors, sum(map(len, ids)))

    def rank(self, query: str, texts: Sequence[str]) -> list[RankedText]:
        """The texts with their scores for the query, most relevant first; for rerankers.

        The scores are those of the model: of a classifier its logit, of Qwen3-Reranker a probability.

        Raises:
            SettingError: the model is no reranker, or a value is no text.
            ContextOverflowError: query and text have more tokens than the context holds.
            EdgeInferError: the model has been closed, or its engine gives no vectors.
        """
        return self.ranking(query, texts).texts

    def ranking(self, query: str, texts: Sequence[str]) -> Ranking:
        """As `rank`, with the number of tokens processed."""
        ranker = self._ranker
        if ranker is None:
            raise SettingError(
                f"rank: {self.name} is no reranker: its file has no classifier; take one such as "
                "bge-reranker-v2-m3"
            )
        given = checked_texts(texts, "rank")
        ids = [ranker.ids(checked_query(query), text) for text in given]
        if ranker.answers is None:
            scores = self._pooled(ids, ranker.classified)
        else:
            scores = [ranker.answered(self._run_from_empty_cache(each, self.engine.append)) for each in ids]
        return Ranking(ranked(given, scores), sum(map(len, ids)))

    def _pooled(
        self, ids: list[list[int]], pool: Callable[[npt.NDArray[np.float32]], Result]
    ) -> list[Result]:
        """`pool` of the hidden states (tokens, hidden_size) of each text before the output head."""
        with self.completer.engine_use(max(map(len, ids), default=0)) as engine:
            self._refuse_closed()
            return [pool(rows) for rows in text_rows(engine, ids)]

    def _run_from_empty_cache(
        self, ids: list[int], read: Callable[[list[int]], npt.NDArray[np.float32]]
    ) -> npt.NDArray[np.float32]:
        with self.completer.engine_use(len(ids)) as engine:
            self._refuse_closed()
            engine.rewind(0)
            return read(ids)

    def keep_snapshot(self, owner: str | None = None) -> bool:
        """Save the KV cache to disk, if the model was loaded with `snapshots`.

        Later prompts with the same prefix restore it, in this program or another. `owner`: the chat whose
        deletion also deletes the file, `ChatStore.snapshot_owner`. Returns whether the file exists.
        """
        with self._lock:
            return not self._closed and self._snapshots is not None and self._snapshots.keep(owner)

    @property
    def lora(self) -> tuple[LoraChoice, ...]:
        """The LoRA adapters in use, with their scales."""
        return self._adapters.choices if self._adapters else ()

    def set_lora(self, lora: GivenLora | Iterable[GivenLora] | None) -> None:
        """Use these LoRA adapters from the next token on, and no others; None: no adapter.

        `lora`: as for `edgeinfer.load`. A file that is in use isn't read again, so that a scale changes at
        once. Nothing that was cached with other adapters is used again; running completions read their text
        again. On an error nothing changes.

        Raises:
            SettingError: an invalid value, an adapter that can't be read or doesn't fit the model, or an
                engine that takes none.
            EdgeInferError: the model has been closed.
        """
        choices = lora_choices("lora", lora)
        if self._adapters is None:
            raise SettingError("lora: llama.cpp runs this model, which takes no adapters here")
        with self._lock:
            self._refuse_closed()
            self._adapters.set(choices)
            self.completer.scheduler.restart()
            if self._snapshots is not None:
                self._snapshots = EngineSnapshots(self.engine, self._adapters.snapshot_store())

    def close(self) -> None:
        """Free threads, memory and the file, after the current token. May be called twice; later use of a
        stream raises an `EdgeInferError`.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.engine.close()
            if self.speculator:
                self.speculator.close()
            if self._on_close:
                self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
