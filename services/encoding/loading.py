"""From a mesh's model to the encoder of its prompts."""

from __future__ import annotations

from services.core.settings import MeshSettings
from services.encoding.encoder import Encoder
from services.encoding.prompts import PromptEncoder, TemplatedPrompts
from services.encoding.template import ChatTemplate
from services.models.catalog import Kind, ModelFiles, find_model
from services.models.loading import load_tokenizer, load_vocabulary
from services.models.vocabulary import Vocabulary
from services.runtime.startup import StartupError


def load_encoder(mesh: MeshSettings) -> Encoder:
    """Reads files: takes tenths of a second.

    Raises InvalidArgument when there is no such model, StartupError when its files
    are not what they should be.
    """
    files = find_model(mesh.model)
    try:
        vocabulary, prompts = _load(files)
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot load the model {files.name}: {error}") from error
    return Encoder(
        model=files.name,
        block_tokens=mesh.block_tokens,
        vocabulary=vocabulary,
        prompts=prompts,
    )


def _load(files: ModelFiles) -> tuple[Vocabulary, PromptEncoder]:
    if files.kind is Kind.TEKKEN:
        # An optional dependency, and 0.4 s of imports that other models do without.
        from services.encoding.mistral import MistralPrompts

        vocabulary = load_vocabulary(files)
        return vocabulary, MistralPrompts(files.path, vocabulary)
    vocabulary, tokenizer = load_tokenizer(files)
    source, special_tokens = vocabulary.chat_template, vocabulary.special_tokens
    template = ChatTemplate(source, special_tokens=special_tokens) if source else None
    return vocabulary, TemplatedPrompts(tokenizer, template)
