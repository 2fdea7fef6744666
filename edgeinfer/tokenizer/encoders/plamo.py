"""PLaMo 2's encoding: the split with the highest sum of scores, from the end of a text to its beginning."""

from edgeinfer.tokenizer.encoders.piece_table import PieceTable, check_scores, plain_tokens
from edgeinfer.tokenizer.vocabulary import TokenType, Vocabulary
from edgeinfer_quant_formats.errors import FormatError

_POINTS_PER_SCORE = 1e4
_UNKNOWN_POINTS = -10_000_000
_LOWEST_POINTS = -20_000_000
_BYTE_ORDER_MARK = "\ufeff"


class PlamoEncoder:
    """Encodes plain text to tokens and decodes tokens to bytes.

    Scores are integers, in units of 1/10000. A character without a piece becomes the tokens of its bytes.
    Source: the tokenizer of PLaMo 2 (Preferred Networks) and llama.cpp.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        check_scores(vocabulary)
        points = {
            text: (token, _rounded(float(vocabulary.scores[token]) * _POINTS_PER_SCORE))
            for text, token in plain_tokens(vocabulary).items()
        }
        self._pieces = PieceTable(
            {text: piece for text, piece in points.items() if piece[1] > _LOWEST_POINTS}
        )
        ids = {vocabulary.texts[token].upper(): token for token in vocabulary.of_types(TokenType.BYTE)}
        missing = [f"<0x{byte:02X}>" for byte in range(256) if f"<0X{byte:02X}>" not in ids]
        if missing:
            raise FormatError(f"tokenizer.ggml.tokens: no token {missing[0]} of type BYTE, wanted all 256")
        self._byte_ids = [ids[f"<0X{byte:02X}>"] for byte in range(256)]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, which contains no special tokens; a byte order mark is omitted."""
        text = text.removeprefix(_BYTE_ORDER_MARK)
        steps = self._steps(text)
        ids: list[int] = []
        position = 0
        while position < len(text):
            length, token = steps[position]
            if token is None:
                ids += (self._byte_ids[byte] for byte in text[position].encode("utf-8"))
            else:
                ids.append(token)
            position += length
        return ids

    @staticmethod
    def token_bytes(text: str) -> bytes:
        """Return the bytes of a normal token with this text."""
        return text.encode("utf-8", "surrogateescape")

    def _steps(self, text: str) -> list[tuple[int, int | None]]:
        """Return the length and the token of the best piece at each position; None: its bytes."""
        count = len(text)
        sums = [0] * (count + 1)
        steps: list[tuple[int, int | None]] = [(1, None)] * count
        lengths, values = self._pieces.lengths, self._pieces.values
        for start in range(count - 1, -1, -1):
            # The longest of equally good pieces is taken, and any of them before the bytes.
            best: int | None = None
            for length in lengths(text, start):
                piece = values.get(text[start : start + length])
                if piece is None or start + length > count:
                    continue
                points = sums[start + length] + piece[1]
                if best is None or points > best:
                    best, steps[start] = points, (length, piece[0])
            unknown = sums[start + 1] + _UNKNOWN_POINTS
            if best is None or unknown > best:
                best, steps[start] = unknown, (1, None)
            sums[start] = best
        return steps


def _rounded(number: float) -> int:
    """Return the nearest integer, halves away from zero as in C."""
    return int(number + 0.5) if number >= 0 else -int(0.5 - number)
