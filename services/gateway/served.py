"""What the gateway knows of the model that the mesh serves."""

from __future__ import annotations

from typing import NamedTuple

from services.core.settings import MeshSettings
from services.gateway.tools import ToolFormat, ToolSupport, find_tool_support
from services.models.catalog import Kind, find_model
from services.models.loading import load_vocabulary
from services.models.vocabulary import Vocabulary
from services.runtime.startup import StartupError


class Served(NamedTuple):
    model: str
    vocabulary: Vocabulary
    tools: ToolSupport
    # Prompt and answer together.
    max_context_tokens: int

    @property
    def vocabulary_size(self) -> int:
        return self.vocabulary.vocabulary_size


def load_served(mesh: MeshSettings, *, max_context_tokens: int) -> Served:
    """Reads files: takes tenths of a second.

    Raises InvalidArgument when there is no such model, StartupError when its files are
    not what they should be.
    """
    files = find_model(mesh.model)
    try:
        vocabulary = load_vocabulary(files)
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot load the vocabulary of {files.name}: {error}") from error
    tools = (
        ToolSupport(renders_tools=True, format=ToolFormat.MISTRAL)
        if files.kind is Kind.TEKKEN
        else find_tool_support(vocabulary.chat_template)
    )
    return Served(files.name, vocabulary, tools, max_context_tokens)
