"""A configuration as settings by dotted key, with lines: from YAML, a shell script, a Python script or a notebook."""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from os.path import isfile  # False for a name that is too long
from pathlib import Path
from typing import Any

import yaml

from lmgym.compat.settings.settings import Code, Setting, Settings, scalar
from lmgym.compat.settings.shell import SUMS, Script, Word
from lmgym.config.yaml import LONGEST_RECIPE, load_yaml
from lmgym.core.errors import LmgymError, reason
from lmgym.core.files import read_text

HYDRA = re.compile(r"[+~]{0,2}([A-Za-z_][\w.@/-]*)=(.*)", re.S)
PROGRAM = re.compile(r"(.*\.py|-m|--module|trl)")
ARGS = re.compile(r"\w*args\.\w+$")  # of a command line
LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "lora_dropout": "lora_dropout"}
PEFT = {"lora_r": 8, "lora_alpha": 8}  # what LoraConfig has where a script says nothing


def read(path: Path) -> Settings:
    """The settings of a file. Raises LmgymError for one that cannot be read or holds none."""
    try:
        text = read_text(path, 8 * LONGEST_RECIPE)
    except FileNotFoundError as error:
        raise LmgymError(f"there is no file {path}") from error
    except (OSError, ValueError) as error:
        raise LmgymError(f"{path} is not a readable text: {getattr(error, 'strerror', None) or error}") from error
    kinds = {".yaml": _yaml, ".yml": _yaml, ".py": _python, ".ipynb": _notebook}
    try:
        settings = kinds.get(path.suffix, _shell)(text, path)
    except (yaml.YAMLError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else getattr(error, "lineno", None)
        why = getattr(error, "problem", None) or getattr(error, "msg", None) or reason(error)
        raise LmgymError(f"{path}{f':{line}' if line else ''}: cannot be read: {why}") from error
    if not settings.given:
        raise LmgymError(
            f"{path} holds no settings; give the YAML, the shell script with the command, or the script with the Config"
        )
    return settings


def _yaml(text: str, path: Path, seen: tuple[Path, ...] = ()) -> Settings:
    """Keys of a YAML file, and of the files beside it that `defaults:` names."""
    tree, node = load_yaml(text), yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(tree, Mapping):
        raise LmgymError(f"{path}: a configuration is a mapping of keys to values")
    settings = Settings(program=path.stem)
    bases = tree.get("defaults") or []
    for base in bases if isinstance(bases, list) else [bases]:
        file = path.parent / str(base)
        if isinstance(base, str) and base.endswith((".yaml", ".yml")) and isfile(file) and file not in seen:
            inner = _yaml(read_text(file, 8 * LONGEST_RECIPE), file, (*seen, file))
            settings.given |= {key: s if " of " in s.where else s._replace(where=f"{s.where} of {base}")
                               for key, s in inner.given.items()}  # fmt: skip
            settings.notes += inner.notes
        elif base != "_self_":
            settings.notes.append(f"defaults: {base} is no file beside this one, so its values are not known here")
    lines = dict(_lines(node, ""))
    for key, value in _flat({key: value for key, value in tree.items() if key != "defaults"}, ""):
        for old in [old for old in settings.given if old.startswith(f"{key}.") and not isinstance(value, Mapping)]:
            del settings.given[old]
        settings.given[key] = Setting(scalar(value), f"line {lines.get(key, 1)}")
    return settings


def _flat(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _lines(node: Any, prefix: str) -> Iterator[tuple[str, int]]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            yield f"{prefix}{key.value}", key.start_mark.line + 1
            yield from _lines(value, f"{prefix}{key.value}.")


def _shell(text: str, path: Path, first: int = 1, examples: bool = False) -> Settings:
    """Keys of the command that has the most of them, or of the first of `examples`: a.b=v, --flag v, --config FILE."""
    script = Script(text, first=first)
    found = [settings for words in script.commands if (settings := _command(words)).given]
    several = [one for one in found if len(one.given) > 3][:1] if examples else []
    settings = max(several or found, key=lambda one: len(one.given), default=Settings())
    config = settings.given.get("config") or settings.given.get("config_file_of_run")
    places = [folder / str(config.value) for folder in (Path(), *list(path.absolute().parents)[:6])] if config else []
    if config and (file := next((file for file in places if file.is_file()), None)):
        inner = _yaml(read_text(file, 8 * LONGEST_RECIPE), file)
        named = {key: s._replace(where=f"{s.where} of {config.value}") for key, s in inner.given.items()}
        settings = Settings({**named, **settings.given}, settings.program, inner.notes, {"config"})
    elif config:
        settings.notes.append(f"{config.where}: there is no file {config.value}, so its values are not known here")
    others = sum(len(one.given) > 3 and one is not settings for one in found)
    settings.notes += script.notes + [f"the script has {others} more commands with settings"] * bool(others)
    return settings


def _command(words: list[Word]) -> Settings:
    """What one command says. Flags of the launcher, such as --nproc_per_node, are keys like others."""
    at = next((n for n, word in enumerate(words) if PROGRAM.fullmatch(word.text)), 0)
    settings = Settings(program=" ".join(word.text for word in words[at : at + 2]))
    flag: Word | None = None
    values: list[str] = []
    for place, (text, line) in enumerate([*words, Word("--", 0)]):
        hydra = HYDRA.fullmatch(text)
        if text.startswith("--") or hydra or place == at:
            if flag:
                value = [one.rstrip(",") for one in values] if len(values) > 1 else (values or ["true"])[0]
                settings.given[flag.text] = Setting(scalar(value), f"line {flag.line}")
            flag, values = None, []
        if text.startswith("--") and len(text) > 2:
            name, equals, value = text[2:].partition("=")
            flag, values = Word(name, line), [value] if equals else []
        elif hydra and ("." in hydra[1] or place > at):
            settings.given[hydra[1]] = Setting(scalar(hydra[2].rstrip(",")), f"line {line}")
        elif flag and place != at:
            values.append(text)
    return settings


def _notebook(text: str, path: Path) -> Settings:
    """The code of a notebook's cells, without the lines for the shell and IPython."""
    cells = [cell for cell in json.loads(text).get("cells", []) if cell.get("cell_type") == "code"]
    source = "\n".join("".join(cell.get("source", [])) for cell in cells)
    return _python(re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.M), path)


def _python(text: str, path: Path) -> Settings:
    """Keywords of the calls of a script that matter; where it reads its command line, those of the command in its
    docstring."""
    tree = ast.parse(text)
    settings = Settings(program=path.stem)
    names: dict[str, Any] = {}
    nodes = sorted((node for node in ast.walk(tree) if hasattr(node, "lineno")), key=lambda node: node.lineno)
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                names[target.id] = value_of(node.value, names)
            elif isinstance(target, ast.Attribute) and "args" in ast.unparse(target.value):
                settings.given[target.attr] = Setting(value_of(node.value, names), f"line {node.lineno}")
        elif isinstance(node, ast.Call):
            _call(node, names, settings)
        elif isinstance(node, ast.Dict):
            _message(value_of(node, names), node.lineno, settings)
    for node in nodes:  # what a name stands for that is no value
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            settings.given[f"def {node.name}"] = Setting("", f"line {node.lineno}")
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found = {f"def {one.asname or one.name}": f"{node.module}:{one.name}" for one in node.names}
            settings.given |= {key: Setting(target, f"line {node.lineno}") for key, target in found.items()}
    for doc in [one for one in tree.body if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)]:
        source = "\n".join(text.splitlines()[doc.lineno - 1 : doc.end_lineno]).strip("r\"'\n")
        asked = _shell(re.sub(r"```\w*", "", source), path, doc.lineno + 1, examples=True)
        if asked.given:
            plain = {key: setting for key, setting in settings.given.items() if not isinstance(setting.value, Code)}
            settings.given |= asked.given | plain
            settings.notes.append("settings of the command line are those of the command in the script's own text")
    for key, (value, _) in list(settings.given.items()):
        if isinstance(value, Code) and ARGS.match(value):
            del settings.given[key]
    return settings


def _call(node: ast.Call, names: Mapping[str, Any], settings: Settings) -> None:
    """Keep what a call says: GRPOConfig(...), GRPOTrainer(...), LoraConfig(...), load_dataset(...), from_pretrained."""
    name = ast.unparse(node.func).rpartition(".")[2]
    given = {word.arg: word.value for word in node.keywords if word.arg}
    positional = {"load_dataset": ["dataset_name", "dataset_config"], "from_pretrained": ["model_name_or_path"]}
    if name in positional:
        given = {**dict(zip(positional[name], node.args, strict=False)), **given}
        renamed = {"model_name": "model_name_or_path", "split": "dataset_split", "name": "dataset_config"}
        given = {renamed.get(key, key): value for key, value in given.items()}
        if name == "from_pretrained" and not re.search("Model|LM", ast.unparse(node.func)):
            return
    elif name in ("LoraConfig", "get_peft_model"):
        given = {LORA.get(key, key): value for key, value in given.items()}
    elif not name.endswith(("Trainer", "Config", "Arguments")):
        return
    configures = name.endswith(("Config", "Arguments")) and not settings.program.endswith("Trainer")
    if configures or name.endswith("Trainer"):
        settings.program = name
    for key, value in given.items():
        text = value_of(value, names)
        if key not in settings.given or not isinstance(text, Code):
            settings.given[key] = Setting(text, f"line {value.lineno}")
    if name == "LoraConfig":
        settings.given = {key: Setting(value, "peft's default") for key, value in PEFT.items()} | settings.given


def _message(value: Any, line: int, settings: Settings) -> None:
    """Keep what a chat message of a script says: its system prompt, and the column of the question."""
    if isinstance(value, dict) and {"role", "content"} <= value.keys():
        column = re.search(r"\[['\"](\w+)['\"]\]", str(value["content"]))
        if value["role"] == "system" and not isinstance(value["content"], Code):
            settings.given.setdefault("system_prompt", Setting(value["content"], f"line {line}"))
        elif value["role"] == "user" and column:
            settings.given.setdefault("dataset_prompt_column", Setting(column[1], f"line {line}"))


def value_of(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression, as far as it can be read; else its text, as Code."""
    match node:
        case ast.Constant(value=value) if not isinstance(value, bytes | complex) and value is not ...:
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [value_of(part, names) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return {str(value_of(k, names)): value_of(v, names) for k, v in zip(keys, values, strict=True) if k}
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=words):
            return {str(word.arg): value_of(word.value, names) for word in words}
        case ast.BoolOp(values=parts):  # `args.x or 8`
            known = (value_of(part, names) for part in parts)
            return next((value for value in known if not isinstance(value, Code)), Code(ast.unparse(node)))
        case ast.UnaryOp(op=ast.USub(), operand=inner) if isinstance(one := value_of(inner, names), int | float):
            return -one
        case ast.BinOp(left=left, op=how, right=right) if type(how) in SUMS:
            a, b = value_of(left, names), value_of(right, names)
            numbers = all(isinstance(one, int | float) and abs(one) < 1e15 for one in (a, b))
            if numbers and (b or not isinstance(how, ast.Div | ast.FloorDiv)):
                return SUMS[type(how)](a, b)
            if isinstance(how, ast.Add) and type(a) is type(b) is str:
                return a + b
    return Code(ast.unparse(node))
