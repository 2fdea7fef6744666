"""What a backend can do besides the forward of one sequence."""

from dataclasses import dataclass, replace

from edgeinfer_kernels.decoder import DecoderSpec


@dataclass(frozen=True)
class Capabilities:
    """What a loaded backend can do besides the forward of one sequence. The engine reads it once.

    - `max_step_tokens`: maximum tokens of `step_logits`; 0: unsupported.
    - `max_batch_tokens`: maximum tokens of `forward_batch` for several sequences; 0: unsupported.
    - `max_tree_tokens`: maximum tokens of `forward_tree`; 0: unsupported.
    - `has_recurrent_trees`: that is so with recurrent states too, if all their blocks take trees.
    - `padded_tokens`: number of positions that a step may write in all, if that is more than it has tokens.
    - `max_draft_prompt`: maximum tokens that `draft` evaluates before it drafts; 0: unsupported.
    - `ends_drafts`: `draft` makes no token after one that is too unlikely to be reached.
    - `max_draft_cycles`: maximum drafts of one call of `draft_cycles`, of a draft head and its target which
      both have this capability; 0: unsupported.
    - `kept_states`: number of last positions whose states after the final norm stay on the device, for a
      draft head there; 0: none.
    - `finds_best`: `best_ids` is supported.
    - `starts_verification`: a draft head on the device can start the step that verifies its draft.
    - `sampling_history`: maximum number of recent tokens for the penalties of `sample_next`; None:
      unsupported.
    - `text_tokens`: tokens of `forward_texts` with several texts at which it is fastest; 0: unsupported.
    - `skips_layers`: `forward` can run some of the layers.
    - `has_attention_scores`: `attention_scores` is supported.
    - `has_separate_states`: `with_state` is supported.
    - `max_joined_tokens`: maximum tokens of `forward_states` of a `joined` backend; 0: unsupported.
    - `can_evict`: `evict` is supported; otherwise `unevictable` names in messages what tokens can't leave.
    - `takes_lora`: `set_lora` is supported.
    - `hands_out_hidden`: `keep_hidden` is supported.
    - `limits_output`: `limit_output` is supported.
    - `is_fork_safe`: a forked child process can use the backend; a device driver doesn't work there.
    """

    max_step_tokens: int = 0
    max_batch_tokens: int = 0
    max_tree_tokens: int = 0
    has_recurrent_trees: bool = False
    padded_tokens: int = 0
    max_draft_prompt: int = 0
    ends_drafts: bool = False
    max_draft_cycles: int = 0
    kept_states: int = 0
    finds_best: bool = False
    starts_verification: bool = False
    sampling_history: int | None = None
    text_tokens: int = 0
    skips_layers: bool = False
    has_attention_scores: bool = False
    has_separate_states: bool = False
    max_joined_tokens: int = 0
    can_evict: bool = False
    unevictable: str = "the cache of this engine"
    takes_lora: bool = False
    hands_out_hidden: bool = False
    limits_output: bool = False
    is_fork_safe: bool = False

    def limited_to(self, spec: DecoderSpec) -> "Capabilities":
        """The same capabilities without those that need a state of separate positions, if the model has
        another, or learned positions; those of an encoder only, if it is one.
        """
        if spec.is_encoder:
            return Capabilities(
                text_tokens=self.text_tokens, takes_lora=self.takes_lora, is_fork_safe=self.is_fork_safe
            )
        if not spec.is_recurrent:
            return replace(
                self,
                skips_layers=self.skips_layers and not spec.reads_other_layers,
                can_evict=self.can_evict and not spec.has_positions,
                unevictable="a text with learned positions",
            )
        return replace(
            self,
            max_batch_tokens=0,
            max_tree_tokens=self.max_tree_tokens if self.has_recurrent_trees and spec.takes_trees else 0,
            skips_layers=False,
            has_attention_scores=False,
            can_evict=False,
            unevictable="the state of recurrent layers",
        )
