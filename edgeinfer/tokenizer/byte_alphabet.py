"""GPT-2's alphabet: a printable character for every byte, so that token texts are readable Unicode.

Source: Radford et al. 2019, `bytes_to_unicode` of the GPT-2 code.
"""

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = tuple(byte for byte in range(256) if byte not in _PRINTABLE)

CHARACTER_OF_BYTE = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + index) for index, byte in enumerate(_HIDDEN)
}
_BYTE_OF_CHARACTER = {ord(character): byte for byte, character in CHARACTER_OF_BYTE.items()}


def spell(text: str) -> str:
    """Return the UTF-8 bytes of `text` in the alphabet, one character each."""
    return text.encode("utf-8").decode("latin-1").translate(CHARACTER_OF_BYTE)


def unspell(spelled: str) -> bytes:
    """Return the bytes of `spelled`; a character outside the alphabet gives its UTF-8 bytes."""
    try:
        return spelled.translate(_BYTE_OF_CHARACTER).encode("latin-1")
    except UnicodeEncodeError:
        pieces = (
            bytes([_BYTE_OF_CHARACTER[ord(character)]])
            if ord(character) in _BYTE_OF_CHARACTER
            else character.encode("utf-8", "surrogateescape")
            for character in spelled
        )
        return b"".join(pieces)
