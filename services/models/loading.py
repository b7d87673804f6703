"""From a model's files to what the mesh needs of them, whatever their kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.models import tekken
from services.models.catalog import Kind, ModelFiles
from services.models.gguf import read_metadata
from services.models.vocabulary import TO_ENCODE, Vocabulary, build_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_vocabulary(files: ModelFiles) -> Vocabulary:
    """Takes tenths of a second. Raises OSError or ValueError."""
    match files.kind:
        case Kind.GGUF:
            return Vocabulary.from_metadata(read_metadata(files.path, without=TO_ENCODE))
        case Kind.HUGGING_FACE:
            from services.models import hugging_face  # with `tokenizers`, which few others need

            return hugging_face.read_vocabulary(files.path, hugging_face.read_tokenizer(files.path))
        case Kind.TEKKEN:
            return tekken.read_vocabulary(files.path)


def load_tokenizer(files: ModelFiles) -> tuple[Vocabulary, Tokenizer]:
    """For models whose text goes through `tokenizers`: not for tekken.

    Takes tenths of a second. Raises OSError or ValueError.
    """
    if files.kind is Kind.HUGGING_FACE:
        from services.models import hugging_face

        tokenizer = hugging_face.read_tokenizer(files.path)
        return hugging_face.read_vocabulary(files.path, tokenizer), tokenizer
    metadata = read_metadata(files.gguf_path)
    return Vocabulary.from_metadata(metadata), build_tokenizer(metadata)
