#!/usr/bin/env bash
# Brings into this project what the template has changed since the project was made or last updated:
#
#   scripts/update_from_template.sh                          from the template that .template.json names
#   scripts/update_from_template.sh PATH_OR_URL              from another place, such as a clone on this machine
#   scripts/update_from_template.sh PATH_OR_URL v1.2.0       up to this tag, branch or commit
#   scripts/update_from_template.sh size=full                with another answer to a question; may follow the words above
#   scripts/update_from_template.sh extras=report,doctor     the commands report, sweep or doctor alone, in a project of size=small
#   scripts/update_from_template.sh --check [PATH_OR_URL] FOLDER …     changes nothing: which version each of these projects
#                                                            has, which the template has, and the files of an update
#
# It makes the project twice in a temporary folder, by the old and by the new version, with the answers of .template.json,
# and applies the difference with `git apply -3`. Your own changes stay; where both sides changed the same lines, git shows
# a conflict. What you have deleted stays deleted. Before it changes anything, it says which unfinished runs in runs/ (or
# DDP_RUNS_FOLDER) an update may keep from going on. Look at `git diff HEAD` and commit; `git reset --hard` undoes it all.
#
# Needs git and cookiecutter (or uvx or pipx, which fetch it). The template's hooks run on this machine.
set -euo pipefail

fail() {
  echo "error: $1" >&2
  exit 1
}

# Prints one value of .template.json.
origin() {
  "${PYTHON:-python3}" -c 'import json, sys; print(json.load(open(".template.json", encoding="utf-8"))[sys.argv[1]] or "")' "$1"
}

# Prints the answers to the questions of the template in $work, as NAME=VALUE with a zero byte at the end: those of
# .template.json, changed by the arguments. Answers to questions that this version does not ask are left out. What the
# template no longer offers is replaced as `_retired` in its cookiecutter.json says. If that is null, the project keeps
# the files: the question is written to $work/kept, and has its first answer.
print_answers() {
  "${PYTHON:-python3}" - "$work" "$@" <<'PYTHON'
import json
import os
import sys

work, *words = sys.argv[1:]
questions, old = (json.load(open(path, encoding="utf-8")) for path in (f"{work}/template/cookiecutter.json", ".template.json"))
changes = dict(word.split("=", 1) for word in words)
if "extras" in changes:  # of a private variable, which cookiecutter does not ask for
    changes["_extras"] = changes.pop("extras")
unknown = [name for name in changes if name not in questions]
if unknown:
    sys.exit(f"error: {unknown[0]} is not a question of the template")
def is_offered(name, answer):
    return name in questions and not (isinstance(questions[name], list) and answer not in questions[name])


def tell(line):
    if os.environ.get("TELL"):  # of the three calls, once
        print(line, file=sys.stderr)


answers, kept = {**old["answers"], **changes}, []
for name, answer in [*answers.items()]:
    retired = questions.get("_retired", {}).get(name, {})
    while not is_offered(name, answer) and answer in retired:
        del answers[name]
        former = f"{name}={answer}"
        if retired[answer] is None:
            kept.append(name)
            tell(f"{former} is retired: the project keeps its files")
            break
        name, answer = f"{name}={retired[answer]}".split("=")[-2:]
        tell(f"{former} is retired: {name}={answer} takes its place")
        answers[name] = answer
        retired = questions["_retired"].get(name, {})
for name, answer in answers.items():
    if name in questions and not is_offered(name, answer):
        sys.exit(f"error: the template does not offer {name}={answer}. Add another answer, such as {name}={questions[name][0]}")
    if name in questions:
        sys.stdout.buffer.write(f"{name}={answer}\0".encode())
with open(f"{work}/kept", "w", encoding="utf-8") as file:
    file.write("".join(f"{name}\n" for name in kept))
PYTHON
}

# Makes the project by version $1 of the template in $work/$2, and commits it to the repository $work/versions.
# Further arguments are answers in place of those of .template.json.
bake() {
  git -C "$work/template" checkout --quiet --detach "$1"
  print_answers "${@:3}" >"$work/answers" || exit 1
  local answers=()
  while IFS= read -r -d '' answer; do answers+=("$answer"); done <"$work/answers"
  COOKIECUTTER_CONFIG=$work/settings.yaml "${cookiecutter[@]}" "$work/template" --no-input -o "$work/$2" \
    smoke_test=skip "${answers[@]}" >"$work/log" 2>&1 || fail "version $1 did not make the project: $(tail -n 3 "$work/log")"
  local commit=(git --git-dir="$work/versions" --work-tree="$(echo "$work/$2"/*)" -c core.autocrlf=false)
  "${commit[@]}" add --all --force
  "${commit[@]}" -c user.name=template -c user.email=template -c commit.gpgsign=false -c core.hooksPath=/dev/null \
    commit --quiet --allow-empty --message="$2"
}

# Tells of unfinished runs, and of the defaults of config.yaml that decide what a run computes, that differ between the
# two versions, and that the project has not set otherwise.
tell_of_runs() {
  "${PYTHON:-python3}" - "$work" <<'PYTHON'
import json
import os
import re
import sys
from pathlib import Path


def values(path):
    """Return {key: text} of a config.yaml, with keys such as training.epochs."""
    found, section = {}, ""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        if match := re.match(r"( *)(\w+):(.*?)(?: +#.*)?$", line):
            section = section if match[1] else f"{match[2]}."
            if value := match[3].strip():
                found[section + match[2] if match[1] else match[2]] = value
    return found


def is_unfinished(run):
    try:
        return json.loads((run / "summary.json").read_bytes())["status"] == "stopped"
    except (OSError, ValueError, KeyError):  # killed, or still at work
        return any(run.glob("checkpoints/*.pt"))


folder = Path(os.environ.get("DDP_RUNS_FOLDER") or "runs")
runs = (path.parent for path in folder.glob("**/checkpoints"))
names = sorted(str(run.relative_to(folder)) for run in runs if is_unfinished(run))
if names:
    (old,), (new,) = (Path(sys.argv[1], name).glob("*/config.yaml") for name in ("old", "new"))
    former, latter = old.parent, new.parent
    (checkpoint,) = latter.glob("*/core/checkpoint.py")
    decisive = re.search(r"^DECISIVE = \(([^)]*)\)", checkpoint.read_text(encoding="utf-8"), re.MULTILINE)[1]
    decisive = tuple(re.findall(r'"([\w.]+)"', decisive))
    old, new, own = values(old), values(new), values(Path("config.yaml"))
    changes = [
        f"{key}: {old[key]} -> {new[key]}"
        for key in old
        if re.match(rf"({'|'.join(decisive)})([.]|$)", key) and new.get(key, old[key]) != old[key] == own.get(key, old[key])
    ]
    print(f"unfinished runs ({len(names)}): {', '.join(names[:9])}{', …' if names[9:] else ''}")
    code = [
        path.name
        for path in checkpoint.parents[1].glob("*.py")
        if path.name in ("model.py", "dataset.py", "lab.py") and (former / path.relative_to(latter)).exists()
        and path.read_bytes() != (former / path.relative_to(latter)).read_bytes()
    ]
    if code:
        print(f"  The update changes {', '.join(sorted(code))}. A run that goes on then computes something else, and nothing refuses it.")
        print("  Let these runs end first.")
    if changes:
        print(f"  The update changes {'; '.join(changes)}. A run that reads them with the former values will be refused.")
        print("  Let these runs end first, or write the former values into config.yaml afterwards.")
    else:
        print("  The update changes no default that would refuse them.")
PYTHON
}

if [[ ${1:-} == --check ]]; then
  shift
  template=()
  if (($#)) && [[ ! -f $1/.template.json ]]; then template=("$1") && shift; fi
  (($#)) || set -- "$(dirname "${BASH_SOURCE[0]}")/.."
  code=0
  for folder in "$@"; do
    printf '%s: ' "$folder"
    CHECKED=$folder "${BASH_SOURCE[0]}" ${template[@]+"${template[@]}"} 2>&1 | tail -n 1 || code=1
  done
  exit "$code"
fi
cd "${CHECKED:-$(dirname "${BASH_SOURCE[0]}")/..}"
[[ ! -f .cruft.json ]] || fail "cruft made this project. Type: cruft update"
[[ -f .template.json ]] || fail "there is no .template.json, which says how this project was made"
problem=$(git rev-parse --git-dir 2>&1 >/dev/null) || # such as a repository of another user
  fail "git sees no repository here: $problem. If there is none, type: git init -b main && git add -A && git commit -m Start"
[[ ${CHECKED:-} || -z $(git status --porcelain --untracked-files=no) ]] || fail "there are uncommitted changes. Commit or stash them first."
git ls-files --error-unmatch .template.json >/dev/null 2>&1 || fail ".template.json is not committed. Commit it first."

changes=() words=()
for word in "$@"; do
  if [[ $word =~ ^[a-z_]+= ]]; then changes+=("$word"); else words+=("$word"); fi
done
template=${words[0]:-$(origin template)}
[[ $template ]] || fail "where is the template? Type: scripts/update_from_template.sh PATH_OR_URL"
[[ $template != gh:* ]] || template=https://github.com/${template#gh:}
old=$(origin commit)
old=${old:-v$(origin version)}
if command -v cookiecutter >/dev/null; then
  cookiecutter=(cookiecutter)
elif command -v uvx >/dev/null; then
  cookiecutter=(uvx cookiecutter)
elif command -v pipx >/dev/null; then
  cookiecutter=(pipx run cookiecutter)
else
  fail "cookiecutter is not installed. Type: python -m pip install cookiecutter"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
printf 'replay_dir: %s\ncookiecutters_dir: %s\n' "$work/replay" "$work/clones" >"$work/settings.yaml"
git clone --quiet "$template" "$work/template" || fail "$template cannot be cloned"
for name in "${old%-dirty}" "${words[1]:-HEAD}"; do
  git -C "$work/template" rev-parse --quiet --verify "origin/$name^{commit}" >>"$work/found" ||
    git -C "$work/template" rev-parse --quiet --verify "$name^{commit}" >>"$work/found" ||
    fail "$template has no version $name"
done
git init --quiet --bare "$work/versions"
old=$(sed -n 1p "$work/found") new=$(sed -n 2p "$work/found")
git -C "$work/template" checkout --quiet --detach "$new"
TELL=1 print_answers ${changes[@]+"${changes[@]}"} >"$work/answers" || exit 1
first=()
if [[ -s $work/kept ]]; then # the difference is then that of a project with the first answer
  cp "$work/kept" "$work/no-longer-offered"
  bake "$old" made
  while IFS= read -r name; do
    first+=("$name=$("${PYTHON:-python3}" -c 'import json, sys; print(json.load(open(sys.argv[1], encoding="utf-8"))[sys.argv[2]][0])' \
      "$work/template/cookiecutter.json" "$name")")
  done <"$work/no-longer-offered"
fi
bake "$old" old ${first[@]+"${first[@]}"}
bake "$new" new ${changes[@]+"${changes[@]}"}

# Not in the difference: what you have deleted, what the template has deleted and you have changed, and .template.json,
# which is written below. `git apply` would refuse the whole difference for one of them.
paths=(. ':!.template.json')
if ((${#first[@]})); then
  while IFS= read -r -d '' path; do
    paths+=(":(exclude,literal)$path")
    echo "kept, since the template no longer offers what brought it: $path"
  done < <(git --git-dir="$work/versions" diff -z --name-only --no-renames HEAD~2 HEAD~ -- '*.py')
fi
while IFS= read -r -d '' path; do
  if ! yours=$(git rev-parse --quiet --verify ":./$path"); then
    paths+=(":(exclude,literal)$path")
    git --git-dir="$work/versions" diff --quiet HEAD~ HEAD -- "$path" ||
      echo "not updated, since you have deleted or renamed it: $path"
  elif ! git --git-dir="$work/versions" cat-file -e "HEAD:$path" 2>/dev/null &&
    [[ $yours != $(git --git-dir="$work/versions" rev-parse "HEAD~:$path") ]]; then
    paths+=(":(exclude,literal)$path")
    echo "kept, since you have changed it: $path (the template has deleted it)"
  fi
done < <(git --git-dir="$work/versions" ls-tree -r -z --name-only HEAD~)
git --git-dir="$work/versions" diff-tree -p --no-renames --binary --full-index HEAD~ HEAD -- "${paths[@]}" >"$work/difference"

if [[ ${CHECKED:-} ]]; then
  number=$(grep --count --text '^diff --git ' "$work/difference" || true)
  has=$(origin version) is=$("${PYTHON:-python3}" -c 'import json, sys; print(json.load(open(sys.argv[1], encoding="utf-8"))["_version"])' "$work/template/cookiecutter.json")
  echo "version $has (${old:0:7}); the template has $is (${new:0:7}): an update changes $number files"
  exit
fi

tell_of_runs
# `git apply -3` merges three files, so it needs the old ones here.
git -c gc.auto=0 fetch --quiet --no-tags --no-write-fetch-head "$work/versions" HEAD
prefix=$(git rev-parse --show-prefix)
code=0
if [[ -s $work/difference ]]; then
  (cd "./$(git rev-parse --show-cdup)" && git apply -3 --whitespace=nowarn --directory="$prefix" "$work/difference") || code=1
fi
conflicts=$(git diff --name-only --diff-filter=U)
[[ $code == 0 || $conflicts ]] || fail "git could not apply the difference, for the reason above. Nothing was changed."

"${PYTHON:-python3}" - "$work"/new/*/.template.json <<'PYTHON'
import json
import sys

old, new = (json.load(open(path, encoding="utf-8")) for path in (".template.json", sys.argv[1]))
new["template"] = new["template"] or old["template"]
with open(".template.json", "w", encoding="utf-8", newline="\n") as file:
    file.write(json.dumps(new, indent=2, ensure_ascii=False) + "\n")
PYTHON
git add .template.json
[[ ! $conflicts ]] || fail "conflicts between version $(origin version) of the template and your changes. Resolve them, then git add and git commit (git reset --hard undoes the update):"$'\n'"$conflicts"
echo "The project follows version $(origin version) of the template now. See: git diff HEAD"
