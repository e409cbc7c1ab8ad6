"""Refuses answers that would give a broken project. All bad answers are reported at once, each with a remedy.

Cookiecutter renders this file and runs it before writing any other file. If the exit code is 1, cookiecutter removes
the new folder. It cannot ask again, so the last line printed is a command that keeps the good answers. Cookiecutter
itself checks the answers to multiple-choice questions. The only Jinja here is the line RAW.
"""

from __future__ import annotations

import json
import keyword
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Mapping
from pathlib import Path

RAW = r"""{{ cookiecutter | tojson }}"""
# {% raw %}

EXTRAS = {"doctor", "export", "report", "sweep"}
FREE_TEXT = ("project_name", "description", "author_name")
WINDOWS_DEVICES = {"con", "prn", "aux", "nul"} | {
    f"{port}{i}" for port in ("com", "lpt") for i in range(1, 10)
}
LIBRARIES = set(
    """
    absl absl-py accelerate aiohttp aiosignal alembic annotated-types arrow attr attrs blinker brotli cachetools
    certifi cffi charset-normalizer click cloudpickle contourpy cookiecutter cpuinfo cruft cryptography cycler
    datasets dateutil deepspeed distro docker dotenv einops fastapi filelock flask frozenlist fsspec functorch
    git gitdb google gradio-client graphene graphql grpc grpcio gunicorn hjson horovod httpcore httptools httpx
    huey huggingface-hub idna importlib-metadata iniconfig itsdangerous jinja2 joblib kiwisolver lightning
    lightning-utilities mako markdown markdown-it markupsafe matplotlib mlflow mpl-toolkits mpmath msgpack
    multidict mypy mypy-extensions narwhals networkx ninja numpy nvidia-ml-py opentelemetry orjson packaging
    pandas pathspec peft pillow pip platformdirs pluggy prettytable propcache protobuf psutil py pyarrow pyasn1
    pycparser pydantic pydantic-core pygments pynvml pyparsing pytest pyyaml regex requests rich ruff
    safetensors scikit-learn scipy sentencepiece setuptools six sklearn skops sqlalchemy sqlparse starlette
    sympy tensorboard threadpoolctl timm tokenizers torch torchaudio torchgen torchmetrics torchvision tqdm trackio
    transformers triton typer typing-extensions typing-inspection urllib3 uvicorn uvloop wandb watchfiles
    wcwidth websockets werkzeug wheel workload xxhash yaml yarl zipp
    """.split()
)
FOLDERS = set(
    "build conftest data dist examples run runs scripts template_only template_package tests".split()
)


def find_problems(answers: Mapping[str, str]) -> dict[str, str]:
    """Return {question: problem and remedy} for the bad answers."""
    problems = {}
    for key in FREE_TEXT:
        if problem := text_problem(answers[key]):
            problems[key] = problem
    if not answers["project_name"].strip():
        problems["project_name"] = (
            "it is empty. Give the project a name, such as project_name='My Project'."
        )
    if rule := broken_slug_rule(answers["project_slug"]):
        problems["project_slug"] = (
            f"it must {rule}. Use project_slug={suggest_slug(answers['project_slug'])}"
        )
    if rule := broken_package_rule(answers["package_name"]):
        problems["package_name"] = (
            f"it must {rule}. Use package_name={suggest_package(answers['package_name'])}"
        )
    if problem := device_ids_problem(answers["device_ids"]):
        problems["device_ids"] = problem
    if answers["extra_strategies"] != "none" and answers["size"] != "full":
        problems["extra_strategies"] = (
            "it needs the full size. Use extra_strategies=none, or add size=full"
        )
    unknown = {*filter(None, answers.get("_extras", "").split(","))} - EXTRAS
    if unknown:
        problems["_extras"] = (
            f"there is no {', '.join(sorted(unknown))}. Use _extras={','.join(sorted(EXTRAS))}, or some of them"
        )
    if "tools" in answers:
        remedy = f"Use size={size_of_tools(answers['tools'])}"
        problems["tools"] = f"the question is called size since version 0.3. {remedy}"
    return problems


def size_of_tools(tools: str) -> str:
    """Return the answer to `size` that the answer to the former question `tools` stands for."""
    return "small" if tools == "none" else "full"


def text_problem(text: str) -> str | None:
    if any(unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"} for character in text):
        return "it holds a line break, a control character or half a character. Write one line of printable text."
    if re.search(r"\{\{|\{%|\{#", text):
        return (
            "cookiecutter would read {{, {% or {# as its own syntax. Write the text without them."
        )
    if "# only with " in text:
        return "the template would read `# only with` as its own syntax. Write the text without it."
    return None


def broken_slug_rule(slug: str) -> str | None:
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", slug) or len(slug) > 64:
        return "be words of lower-case letters and digits, joined by - or _, a letter first, at most 64 characters"
    if slug in WINDOWS_DEVICES:
        return "not be a device name of Windows"
    if slug.replace("_", "-") in LIBRARIES:
        return "not be the name of a library that the project installs"
    return None


def broken_package_rule(name: str) -> str | None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or len(name) > 40:
        return "be lower-case letters, digits and _, a letter first, at most 40 characters"
    if keyword.iskeyword(name) or name in sys.stdlib_module_names:
        return "not be a keyword or a module of Python itself"
    if name.replace("_", "-") in LIBRARIES:
        return "not be the name of a library that the project uses"
    if name in WINDOWS_DEVICES | FOLDERS:
        return "not be a name that the project or Windows already uses"
    return None


def suggest_slug(text: str) -> str:
    """Return a valid slug close to the given text."""
    ascii_text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", ascii_text).strip("-")[:56].strip("-")
    return (
        f"project-{slug}".strip("-") if not slug[:1].isalpha() or broken_slug_rule(slug) else slug
    )


def suggest_package(text: str) -> str:
    """Return a valid package name close to the given text."""
    name = suggest_slug(text).replace("-", "_")[:32].strip("_")
    return f"project_{name}" if broken_package_rule(name) else name


def device_ids_problem(text: str) -> str | None:
    entry = r"\s*(?:\d{1,4}|cpu)\s*"
    entries = re.findall(r"\d+|cpu", text)
    if re.fullmatch(r"auto(:[1-9]\d{0,3})?|mps", text):
        return None
    if not re.fullmatch(rf"{entry}(,{entry})*|\s*\[{entry}(,{entry})*\]\s*", text):
        return "it must be auto, auto:2, ids such as 0,2 or [0, 2], cpu, cpu,cpu, or mps. Use device_ids=auto"
    gpus = [int(entry) for entry in entries if entry != "cpu"]
    if gpus and "cpu" in entries:
        return f"GPUs and cpu cannot train together. Use device_ids={','.join(map(str, gpus))} or device_ids=cpu"
    if len(set(gpus)) < len(gpus):
        return f"a GPU is named twice. Use device_ids={','.join(map(str, dict.fromkeys(gpus)))}"
    return None


def typed_tools() -> dict[str, str]:
    """Return {"tools": ANSWER} if cookiecutter's command line has it, as old notes and old projects' scripts do.

    Cookiecutter drops answers to questions that do not exist, so RAW does not show it.
    """
    parent, words = os.getppid(), []
    if Path(f"/proc/{parent}/cmdline").exists():
        words = Path(f"/proc/{parent}/cmdline").read_bytes().decode(errors="replace").split("\0")
    elif shutil.which("ps"):
        command = ["ps", "-ww", "-o", "args=", "-p", str(parent)]
        words = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, encoding="utf-8"
        ).stdout.split()
    return dict(word.split("=", 1) for word in words if word.startswith("tools="))


def repeat_command(answers: Mapping[str, str], problems: Mapping[str, str]) -> str:
    """Return the command line that asks again and keeps the good answers."""
    good = {
        key: value
        for key, value in answers.items()
        if not key.startswith("_") and key not in problems
    }
    if "tools" in answers:
        good["size"] = size_of_tools(answers["tools"])
    template = answers.get("_template", "TEMPLATE")
    if "_output_dir" not in answers:  # cruft
        return shlex.join(["cruft", "create", template, "--extra-context", json.dumps(good)])
    checkout = ["--checkout", answers["_checkout"]] if answers.get("_checkout") else []
    pairs = [f"{key}={value}" for key, value in good.items()]
    return shlex.join(["cookiecutter", template, "-o", answers["_output_dir"], *checkout, *pairs])


def main() -> int:
    answers = json.loads(RAW) | typed_tools()
    if "{{" in answers["__project_name_q"]:  # cookiecutter 1 does not render it
        remedy = "Type: python -m pip install 'cookiecutter>=2.7'"
        print(f"error: this cookiecutter is too old for the template. {remedy}", file=sys.stderr)
        return 1
    if Path(__file__).is_relative_to(tempfile.gettempdir()):
        Path(__file__).unlink()  # the rendered copy of this file, which cookiecutter leaves behind
    problems = find_problems(answers)
    # cookiecutter -f would overwrite the user's work
    if any(path.name != ".git" for path in Path.cwd().iterdir()):
        problems["project_slug"] = (
            f"{Path.cwd()} is not empty. Choose another name; `cruft update` updates a project."
        )
    if not problems:
        return 0
    print("These answers would give a broken project:", file=sys.stderr)
    for key, problem in problems.items():
        print(f"  {key}={answers[key]!r}: {problem}", file=sys.stderr)
    print(
        f"Nothing was written. To keep the other answers:\n  {repeat_command(answers, problems)}",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
# {% endraw %}
