"""The C interface of llama.cpp, as the pinned xllamacpp wheel exports it.

The structs below are those of one llama.cpp build (b11549); they differ between
builds, and a wrong one corrupts memory without a word. So the wheel's version
is pinned, the symbols are looked up and the default parameters compared before
anything else is called. ctypes.CDLL drops the GIL around each call.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_size_t,
    c_uint32,
    c_void_p,
)
from pathlib import Path
from typing import Any

from services.runtime.startup import StartupError

PACKAGE = "xllamacpp"
VERSION = "2026.10.11549"
FILE_NAME = "xllamacpp.abi3.so"

TYPE_Q8_0 = 8
TYPE_BF16 = 30
FLASH_ATTENTION_ON = 1

logger = logging.getLogger(__name__)


class ModelParams(Structure):
    """struct llama_model_params"""

    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class ContextParams(Structure):
    """struct llama_context_params"""

    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int32),
        ("rope_scaling_type", c_int32),
        ("pooling_type", c_int32),
        ("attention_type", c_int32),
        ("flash_attn_type", c_int32),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class Batch(Structure):
    """struct llama_batch"""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", c_void_p),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", c_void_p),
    )


LogCallback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)

# Name: (result, arguments)
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (LogCallback, c_void_p)),
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_model_free": (None, (c_void_p,)),
    "llama_model_n_ctx_train": (c_int32, (c_void_p,)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParams)),
    "llama_free": (None, (c_void_p,)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_get_logits": (POINTER(c_float), (c_void_p,)),
    "llama_state_seq_get_size_ext": (c_size_t, (c_void_p, c_int32, c_uint32)),
    "llama_state_seq_get_data_ext": (
        c_size_t,
        (c_void_p, c_void_p, c_size_t, c_int32, c_uint32),
    ),
    "llama_state_seq_set_data_ext": (
        c_size_t,
        (c_void_p, c_void_p, c_size_t, c_int32, c_uint32),
    ),
}

_DEFAULT_MODEL_PARAMS = {"n_gpu_layers": -1, "split_mode": 1, "use_extra_bufts": True}
_DEFAULT_CONTEXT_PARAMS = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "flash_attn_type": -1,
    "yarn_ext_factor": -1.0,
    "defrag_thold": -1.0,
    "type_k": 1,
    "type_v": 1,
    "offload_kqv": True,
    "swa_full": True,
    "kv_unified": False,
    "n_samplers": 0,
    "ctx_other": None,
}


def load_library(*, passive_wait: bool) -> ctypes.CDLL:
    """The library, checked and initialised.

    `passive_wait`: let idle threads of a step sleep at once, not spin. Decides only
    when the library is loaded for the first time in this process.
    Raises StartupError when it is missing or another than the one described here.
    """
    path = _find_library()
    if passive_wait:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # An assertion that fails in llama.cpp would first start a debugger, if it finds one.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise StartupError(f"the engine's library cannot be loaded: {error}") from error
    _declare_functions(library)
    _check_defaults(library.llama_model_default_params(), _DEFAULT_MODEL_PARAMS)
    _check_defaults(library.llama_context_default_params(), _DEFAULT_CONTEXT_PARAMS)
    library.llama_log_set(_forward_log, None)
    library.llama_backend_init()
    return library


@contextmanager
def collect_errors(library: ctypes.CDLL) -> Iterator[list[str]]:
    """What llama.cpp logs as errors meanwhile, for an exception to say."""
    errors: list[str] = []

    def collect(level: int, text: bytes, user_data: object) -> None:
        if level == _LOG_ERROR:
            errors.append(text.decode(errors="replace").strip())
        else:
            _log(level, text, user_data)

    callback = LogCallback(collect)
    library.llama_log_set(callback, None)
    try:
        yield errors
    finally:
        library.llama_log_set(_forward_log, None)


def _find_library() -> Path:
    # Found, not imported: importing it would start its own server machinery.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise StartupError(f"the engine is not installed; run: pip install {PACKAGE}=={VERSION}")
    installed = importlib.metadata.version(PACKAGE)
    if installed != VERSION:
        raise StartupError(
            f"{PACKAGE} {installed} is installed, but its C structs are known for {VERSION} only;"
            f" run: pip install {PACKAGE}=={VERSION}"
        )
    return Path(spec.submodule_search_locations[0]) / FILE_NAME


def _declare_functions(library: ctypes.CDLL) -> None:
    missing = [name for name in _FUNCTIONS if not hasattr(library, name)]
    if missing:
        raise StartupError(f"the engine's library does not export {', '.join(missing)}")
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments


def _check_defaults(params: Structure, expected: dict[str, Any]) -> None:
    wrong = [name for name, value in expected.items() if getattr(params, name) != value]
    if wrong:
        raise StartupError(
            f"the engine's library has another layout of {type(params).__doc__};"
            f" unexpected defaults: {', '.join(wrong)}"
        )


_LOG_ERROR = 4
# ggml_log_level to Python's. llama.cpp's warnings are remarks about its own tuning.
_LOG_LEVELS = {2: logging.DEBUG, 3: logging.DEBUG, _LOG_ERROR: logging.ERROR}


def _log(level: int, text: bytes, _user_data: object) -> None:
    logger.log(_LOG_LEVELS.get(level, logging.NOTSET), text.decode(errors="replace").rstrip())


# Never freed: the library keeps the pointer.
_forward_log = LogCallback(_log)
