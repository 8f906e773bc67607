"""The words of the program `parallm`: its commands, their arguments, and where each is done.

Only the module of the command that is asked for is imported, so that a view of a server takes as long as its answer.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name

from parallm import __version__

SUCCESS, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
ADDRESS = "unix:PATH or http://HOST:PORT; else PARALLM_HOST, else the user's own socket, else http://127.0.0.1:8000"
PROGRAMS = {
    "serve": ("parallm.serve:main", "serve a model over HTTP"),
    "train": ("parallm.train:main", "serve a model and train it"),
    "eval": ("parallm.evaluate:main", "put adapters beside the base on held-out problems"),
    "export": ("parallm.export:main", "write an adapter, or a model with the adapter merged in"),
    "front": ("parallm.front:main", "one address before servers that run elsewhere"),
    "dashboard": ("parallm.dashboard:main", "show and compare runs in a browser, without a model"),
}
"""Programs with a configuration of their own: their words are keys, `parallm serve --help` shows them."""
Parser = argparse.ArgumentParser


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the program. `function` is `module:name` of a function from arguments to an exit code."""

    function: str
    summary: str
    add: Callable[[Parser], object] = lambda parser: None
    """Declares its arguments."""
    asks_server: bool = True


def main() -> None:
    """Run the command of the process's arguments and end with its exit code."""
    words = sys.argv[1:]
    if not is_program(words):
        # httpx loads a command line of its own where it finds click, a third of the time of `parallm list`
        sys.modules["click"] = None  # type: ignore[assignment]  # Python's mark of a module that is not there
    sys.exit(run(words))


def run(words: Sequence[str]) -> int:
    """Return the exit code: 0, 1 for a failure, 2 for wrong words, 130 after Ctrl-C; `status` and programs have
    more."""
    if is_program(words):
        sys.argv = [f"parallm {words[0]}", *words[1:]]
        resolve_name(PROGRAMS[words[0]][0])()
        return SUCCESS
    parser = make_parser()
    arguments, rest = parser.parse_known_args(words)
    # argparse takes no words of a list behind an option that follows its first ones
    if wrong := [word for word in rest if word.startswith("-") or "words" not in arguments]:
        parser.error(f"{wrong[0]}: unknown")
    arguments.words = [*getattr(arguments, "words", ()), *rest]
    if arguments.function is None:
        parser.print_help(sys.stderr)
        return USAGE
    try:
        code: int = resolve_name(arguments.function)(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # a pager or `head` has seen enough
        sys.stdout = None  # nothing is left to flush at exit
        return SUCCESS


def is_program(words: Sequence[str]) -> bool:
    return bool(words) and words[0] in PROGRAMS


def make_parser() -> Parser:
    """Return the parser of all commands but the programs'."""
    parser = _Parser(
        prog="parallm",
        description="Serve a language model, train it while it serves, and talk to it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="programs with keys of their own, `parallm serve --help` shows them:\n"
        + "".join(f"  {name:<11} {summary}\n" for name, (_, summary) in PROGRAMS.items()),
    )
    parser.add_argument("--version", action="version", version=f"ParaLLM {__version__}")
    parser.set_defaults(function=None)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", parser_class=_Parser)
    for name, command in COMMANDS.items():
        one = commands.add_parser(name, help=command.summary, description=f"{command.summary}.".capitalize())
        one.set_defaults(function=command.function)
        if command.asks_server:
            one.add_argument("--host", help=ADDRESS)
        command.add(one)
    return parser


class _Parser(argparse.ArgumentParser):
    """Names the nearest command for one that does not exist."""

    def error(self, message: str) -> "None":  # type: ignore[override]  # it leaves as argparse's does
        text = message
        if "invalid choice: " in message:
            wrong = message.partition("invalid choice: ")[2].partition("'")[2].partition("'")[0]
            nearest = resolve_name("difflib:get_close_matches")(wrong, [*COMMANDS, *PROGRAMS], n=1)
            text = f"{wrong}: no such command" + (f", did you mean {nearest[0]}?" if nearest else "")
        sys.stderr.write(f"parallm: {text}; `{self.prog} --help` shows what there is\n")
        sys.exit(USAGE)


def _json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print the server's answer as it is")


def _model(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL")


def _show(parser: Parser) -> None:
    _model(parser)
    _json(parser)


def _run(parser: Parser) -> None:
    _model(parser)
    parser.add_argument("words", metavar="PROMPT", nargs="*", help="without one, a conversation begins")
    parser.add_argument("--system", metavar="TEXT", help="message before the conversation")
    parser.add_argument("--format", metavar="json|FILE", help="answer in JSON, or by the JSON schema of a file")
    parser.add_argument(
        "--think", metavar="LEVEL", nargs="?", const="true", help="reason first: true, false, low, medium or high"
    )
    parser.add_argument("--hidethinking", action="store_true", help="do not show the reasoning")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="limit of an answer")
    parser.add_argument("--temperature", type=float, metavar="T")
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument("--keepalive", metavar="SECONDS", type=float, help="stay loaded so long; negative: for ever")
    parser.add_argument("--no-start", action="store_true", help="fail where no server answers")
    parser.add_argument("--verbose", action="store_true", help="show counts and durations after each answer")


def _embed(parser: Parser) -> None:
    _model(parser)
    parser.add_argument("words", metavar="TEXT", nargs="*", help="without one, each line of standard input")
    parser.add_argument("--dimensions", type=int, metavar="N")


def _adapters(parser: Parser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", title="actions; without one, all versions in memory")
    parser.set_defaults(action="list")
    _json(parser)
    load = actions.add_parser("load", help="serve a folder below server.adapters_root as the next version of a name")
    load.add_argument("path", metavar="FOLDER")
    promote = actions.add_parser("promote", help="let the bare name mean a version")
    promote.add_argument("version", metavar="VERSION", type=int)
    rollback = actions.add_parser("rollback", help="let the bare name mean the version below")
    remove = actions.add_parser("rm", help="forget an adapter, or one version NAME@VERSION")
    remove.add_argument("model", metavar="NAME")
    save = actions.add_parser("save", help="download an adapter, or one version NAME@VERSION, as a zip archive")
    save.add_argument("model", metavar="NAME")
    save.add_argument("file", metavar="FILE", nargs="?", help="NAME.zip without it; no file is replaced")
    save.set_defaults(action="save")
    for name, action in (("load", load), ("promote", promote), ("rollback", rollback), ("rm", remove)):
        action.set_defaults(action=name)
        if action is not remove:
            action.add_argument("--name", default="policy", help="adapter, policy without it")


def _training(parser: Parser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        default="status",
        choices=("status", "pause", "resume", "step", "checkpoint", "evaluate", "stop"),
    )
    parser.add_argument("--policy", metavar="NAME", help="one of several; all of them without it")
    _json(parser)


def _copy(parser: Parser) -> None:
    parser.add_argument("source", metavar="MODEL")
    parser.add_argument("destination", metavar="NAME")


def _create(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-f", "--file", metavar="FILE", help="a Modelfile with FROM, SYSTEM, PARAMETER and MESSAGE")
    source.add_argument("--from", dest="source", metavar="MODEL", help="a name, a folder or a hub id in the cache")
    parser.add_argument("--system", metavar="TEXT", help="message before every conversation")


def _stop(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="unload it; without one the user's own server ends")


def _service(parser: Parser) -> None:
    parser.add_argument("action", choices=("install", "uninstall", "start", "stop", "logs"))
    parser.add_argument("words", metavar="KEY=VALUE", nargs="*", help="keys of parallm.serve, for install")
    scope = parser.add_mutually_exclusive_group()
    scope.add_argument("--user", action="store_true", help="a service of this user, the default")
    scope.add_argument("--system", action="store_true", help="a service of the machine, with a user of its own")
    parser.add_argument("--print", action="store_true", help="show the units and write nothing")


def _config(parser: Parser) -> None:
    parser.add_argument("action", nargs="?", default="show", choices=("path", "show", "check"))


COMMANDS: dict[str, Command] = {
    "run": Command("parallm.cli.chat:run", "talk to a model, or get one answer", _run),
    "chat": Command("parallm.cli.chat:run", "the same as run", _run),
    "list": Command("parallm.cli.models:list_models", "list the names of models", _json),
    "ls": Command("parallm.cli.models:list_models", "the same as list", _json),
    "ps": Command("parallm.cli.models:list_loaded", "list the models in memory", _json),
    "show": Command("parallm.cli.models:show", "show what is known of a model", _show),
    "pull": Command("parallm.cli.registry:pull", "make a model of a folder or the hub known to the server", _model),
    "create": Command("parallm.cli.registry:create", "give a model a name, with a system message of its own", _create),
    "cp": Command("parallm.cli.registry:copy", "give a model another name", _copy),
    "rm": Command("parallm.cli.registry:remove", "forget a name, and its files if the server made them", _model),
    "stop": Command("parallm.cli.registry:stop", "unload a model, or end the user's own server", _stop),
    "embed": Command("parallm.cli.models:embed", "print a vector for each text, as lines of JSON", _embed),
    "adapters": Command("parallm.cli.control:adapters", "list, load, promote, save and forget adapters", _adapters),
    "training": Command(
        "parallm.cli.control:training", "watch, pause, step, save, evaluate and stop training", _training
    ),
    "status": Command("parallm.cli.control:status", "say whether a server answers; exit code 0, 3 (none), 4", _json),
    "service": Command(
        "parallm.cli.service:service",
        "let systemd or launchd keep a server running: install, uninstall, start, stop, logs",
        _service,
        asks_server=False,
    ),
    "config": Command(
        "parallm.cli.configuration:config",
        "where the user's configuration file is, what it sets, whether it is right",
        _config,
        asks_server=False,
    ),
}
"""Commands in the order of `--help`."""
