"""The tokenizer as a node: it loads the mesh's model's vocabulary and serves it."""

from __future__ import annotations

import asyncio
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

from firsttoken.control.v1 import control_pb2
from firsttoken.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from services.core.settings import MeshSettings
from services.models.catalog import find_model
from services.models.gguf import read_metadata
from services.models.vocabulary import Vocabulary, build_tokenizer
from services.runtime.membership import ControlClient
from services.runtime.resource import Resource
from services.runtime.server import MeshServer
from services.runtime.startup import StartupError
from services.runtime.telemetry import Tracing
from services.tokenizer.encoder import Encoder
from services.tokenizer.service import Backend, TokenizerService
from services.tokenizer.template import ChatTemplate

SERVICE_NAME = tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name


class TokenizerNode(Resource):
    """An async context manager: entered, it is a ready member of the mesh, serving at `.address`.

    Entering raises StartupError or InvalidArgument when it cannot be.
    """

    def __init__(self, *, control: str, listen: str = "127.0.0.1:0") -> None:
        self._control = control
        self._listen = listen
        self.id = f"tokenizer-{uuid.uuid4().hex[:8]}"
        self.address = ""

    async def _open(self, stack: AsyncExitStack) -> None:
        control = await stack.enter_async_context(ControlClient(self._control, self._member()))
        config = control.snapshot.config
        tracing = await stack.enter_async_context(
            Tracing(config.telemetry.otlp_endpoint, service="tokenizer", member_id=self.id)
        )
        encoder = await asyncio.to_thread(load_encoder, config.mesh)
        threads = ThreadPoolExecutor(config.tokenizer.threads, thread_name_prefix="encode")
        # Waiting for threads would block the loop.
        stack.push_async_callback(asyncio.to_thread, threads.shutdown, cancel_futures=True)
        server = MeshServer(self._listen, service_names=[SERVICE_NAME])
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(
            TokenizerService(Backend(encoder, threads, control, tracing)), server.server
        )
        await stack.enter_async_context(server)
        await server.set_serving(True)
        self.address = server.address
        control.update(
            address=self.address,
            model=encoder.model,
            state=control_pb2.MEMBER_STATE_READY,
            detail="",
        )
        # Leaving runs in reverse: say so, end the calls, then what they need.
        stack.callback(control.update, state=control_pb2.MEMBER_STATE_DRAINING)

    def _member(self) -> control_pb2.Member:
        return control_pb2.Member(
            id=self.id,
            role=control_pb2.MEMBER_ROLE_TOKENIZER,
            state=control_pb2.MEMBER_STATE_STARTING,
            detail="loading the vocabulary",
            pid=os.getpid(),
        )


def load_encoder(mesh: MeshSettings) -> Encoder:
    """Reads files: takes tenths of a second.

    Raises InvalidArgument when there is no such model, StartupError when its files
    are not what they should be.
    """
    files = find_model(mesh.model)
    try:
        metadata = read_metadata(files.gguf_path)
        vocabulary = Vocabulary.from_metadata(metadata)
        return Encoder(
            model=files.name,
            block_tokens=mesh.block_tokens,
            vocabulary=vocabulary,
            tokenizer=build_tokenizer(metadata),
            template=_template(vocabulary),
        )
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot load the model {files.name}: {error}") from error


def _template(vocabulary: Vocabulary) -> ChatTemplate | None:
    if not vocabulary.chat_template:
        return None
    eos_token_id = next(iter(vocabulary.eos_token_ids), None)
    return ChatTemplate(
        vocabulary.chat_template,
        special_tokens={
            "bos_token": vocabulary.spelling(vocabulary.bos_token_id),
            "eos_token": vocabulary.spelling(eos_token_id),
        },
    )
