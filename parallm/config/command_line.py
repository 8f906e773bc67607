"""Words of a command line other than overrides: `--help`, `--version`, options of Hydra, and mistakes."""

from collections.abc import Iterable, Iterator, Sequence

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallm.config.errors import KnownKeys
from parallm.errors import ConfigError

HELP = {"-h", "--help", "help"}
VERSION = {"--version", "version"}
WITH_VALUE = {
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    "--experimental-rerun",
}
"""Options of Hydra whose value is the next word."""
ALONE = {"--resolve", "--run", "-r", "--multirun", "-m", "--shell-completion", "-sc", "--info", "-i", "--hydra-help"}


def asks_version(arguments: Iterable[str]) -> bool:
    return any(word in VERSION for word in arguments)


def help_topics(arguments: Sequence[str]) -> list[str] | None:
    """Return the topics of `--help trainer`; an empty list for an overview, None without `--help`."""
    asked = [word for word in arguments if word.partition("=")[0] in HELP]
    if not asked:
        return None
    topics = [word.partition("=")[2] for word in asked if "=" in word]
    return topics + [word for word in arguments if not word.startswith("-") and "=" not in word and word not in HELP]


def check_words(arguments: Sequence[str], known: KnownKeys, recipes: Iterable[str] | None) -> None:
    """Raise ConfigError with one line for each word that is neither an override nor an option.

    `recipes` has the names of all recipes; None for a command without recipes.
    """
    wrong = [*_wrong_words(arguments, known, recipes), *repeated_keys(arguments)]
    if wrong:
        raise ConfigError("\n".join(wrong))


def _wrong_words(arguments: Sequence[str], known: KnownKeys, recipes: Iterable[str] | None) -> Iterator[str]:
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option in WITH_VALUE:
            if not equals:
                next(words, None)
        elif word in ALONE:
            continue
        elif word.startswith("-"):
            name = option.lstrip("-")
            if name == "recipe":
                yield f"{word}: a recipe is chosen by +recipe={value if equals else next(words, 'NAME')}"
            elif name.partition(".")[0] in known:
                yield f"{word}: a key stands without dashes: {name}={value or 'VALUE'}"
            else:
                yield f"{word}: unknown option; --help shows what there is"
        elif option == "+recipe" and recipes is None:
            yield f"{word}: belongs to parallm.train; this command takes no recipe"
        elif equals or word.startswith("~"):
            continue
        elif word in (recipes or ()):
            yield f"{word}: a recipe is chosen by +recipe={word}"
        elif word.partition(".")[0] in known:
            yield f"{word}: a key needs a value: {word}=VALUE; --help {word} says which"
        else:
            yield f"{word}: neither key=value nor group=choice; --help shows what there is"


def repeated_keys(arguments: Iterable[str]) -> list[str]:
    """Return one line for each mapping with a repeated key, of which Hydra would silently keep the last."""
    wrong = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        try:
            OmegaConf.create(value if value.startswith("{") else "")
        except yaml.constructor.ConstructorError as error:
            wrong.append(f"{key.lstrip('+')}: {error.problem}")
        except (yaml.YAMLError, OmegaConfBaseException):
            pass  # Hydra's grammar differs and reports its own errors
    return wrong
