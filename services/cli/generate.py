"""firsttoken generate: an answer, and where the time to its first token went."""

from __future__ import annotations

import argparse
import json
import sys

from firsttoken.client import MAX_DEADLINE_S, Answer, Options
from services.cli import answers, prompts, rpc
from services.cli.failures import Failure
from services.cli.prompts import Prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    prompts.add_arguments(parser)
    add(
        "--max-tokens",
        type=_number,
        metavar="N",
        help="most tokens to generate (default 128)",
    )
    add("--temperature", type=float, metavar="T", help="0, the default, is greedy")
    add("--top-p", type=float, metavar="P", help="sample from the likeliest that reach P")
    add("--seed", type=_number, metavar="N", help="same seed, same answer")
    add("--stop", action="append", metavar="TEXT", help="end before TEXT; may be repeated")
    add("--deadline", type=_seconds, metavar="SECONDS", help="give up after this long")
    rpc.add_router_option(parser)
    add("--json", action="store_true", help="print one line of JSON, and nothing else")


def run(arguments: argparse.Namespace) -> int:
    prompt = prompts.read_prompt(arguments)
    answer = rpc.run(_generate(prompt, arguments))
    if arguments.json:
        print(json.dumps(answers.to_document(answer)), flush=True)
    else:
        answers.print_answer_end(answer)
    return 0


async def _generate(prompt: Prompt, arguments: argparse.Namespace) -> Answer:
    options = Options(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stop=arguments.stop,
        deadline_s=arguments.deadline,
    )
    write = _ignore if arguments.json else answers.print_piece
    try:
        client_of = rpc.mesh_client(
            arguments.router, tls_dir=arguments.tls_dir, api_key=arguments.api_key
        )
        async with client_of as client:
            return await answers.stream_answer(client, prompt, options, write)
    except Failure:
        if sys.stdout.isatty():
            print()  # the text may have ended anywhere
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise Failure(f"the request makes no sense: {error}", code="INVALID_ARGUMENT") from None


def _ignore(text: str) -> None:
    """The answer has it all."""


def _number(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1 << 64:
        raise argparse.ArgumentTypeError("must be in [0, 2**64)")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= MAX_DEADLINE_S:
        raise argparse.ArgumentTypeError(f"must be in (0, {MAX_DEADLINE_S:.0f}]")
    return value
