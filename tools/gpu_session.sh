#!/usr/bin/env bash
# Measure on a rented GPU in three parts of at most ten minutes each, and pack the results.
#
# usage: tools/gpu_session.sh PART [--device cuda|cpu] [--out DIR] [--limit SECONDS] [--seconds-scale X]
#        tools/gpu_session.sh --wheels
#
#   PART              1: tests and tuning. 2: kernels, README, binary. 3: sweeps and quality.
#                     Or a file of steps, written like the parts below.
#   --device cpu      leaves out what needs a GPU; with --seconds-scale 0.3 a dry run.
#   --out DIR         where the packed files go; by default $OUT or gpu-session.
#   --limit SECONDS   when the machine ends the command; steps that no longer fit are skipped. Default 590.
#   --seconds-scale X multiplies the time of every step. Default 1.
#   --wheels          prints how to download the packages that this Python lacks. Wheels in ./wheels are used.
#
# Example: tools/gpu_session.sh 1 --out results-of-card
#
# The interpreter is $PYTHON or python3. Nothing has to be installed: the repository itself is imported.
#
# DIR gets partN.summary.tsv (step, status, seconds, last line) and partN.tar.gz.00, .01, ... of at most 16 MiB:
# results, tuned tables and logs. They are packed after every step, and once more when the script ends or is
# killed. To unpack them into results/, impls/kernels/tuned/ and gpu-session/, in the root of the repository:
#
#   cat DIR/part1.tar.gz.* | tar -xz
#
# Exit codes: 0 every step that was run is ok; 1 a step failed, none could be run, results are not packed, or
# --wheels found missing packages; 2 usage.
set -uo pipefail

root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
python=${PYTHON:-python3}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
device=cuda out=${OUT:-gpu-session} limit=590 scale=1 part=''
grace=20        # seconds that a step may take beyond its own: to start, and to store its results
kill_after=10   # seconds between asking a step to end and ending it
files=8 file_bytes=$((16 * 1024 * 1024))
tuned=impls/kernels/tuned

help() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
usage() { echo "$1; see tools/gpu_session.sh --help" >&2; exit 2; } # MESSAGE

while (($#)); do
  case $1 in
    --help | -h) help; exit 0 ;;
    --wheels) exec "$python" -m esbench.wheels ;;
    --device | --out | --limit | --seconds-scale)
      (($# > 1)) || usage "$1 needs a value"
      case $1 in
        --device) device=$2 ;;
        --out) out=$2 ;;
        --limit) limit=$2 ;;
        --seconds-scale) scale=$2 ;;
      esac
      shift 2
      ;;
    -*) usage "no option $1" ;;
    *)
      [[ ! $part ]] || usage "one PART at a time, not $part and $1"
      part=$1
      shift
      ;;
  esac
done
[[ $part == [123] || -f $part ]] || usage "PART ${part:-is missing}: expected 1, 2, 3 or a file"
[[ $device == cuda || $device == cpu ]] || usage "--device $device: expected cuda or cpu"
[[ $limit =~ ^[1-9][0-9]*$ ]] || usage "--limit $limit: expected a whole number of seconds"
[[ $scale =~ ^[0-9]*\.?[0-9]+$ && $scale =~ [1-9] ]] || usage "--seconds-scale $scale: expected a number above 0"

name=part$part
[[ -f $part ]] && part=$(realpath "$part") name=$(basename "$part" .sh)
out=$(realpath -m "$out")
cd "$root" || exit 2
work=$(mktemp -d) || exit 2
logs=$work/gpu-session/$name
summary=$logs/summary.tsv
results=$work/results
mkdir -p "$out" "$logs" "$results" "$work/$tuned" "$work/pieces" || exit 2
: >"$summary"
child='' current='' began=0 stopped='' failures=0 ran=0 not_packed=''

record() { # NAME STATUS SECONDS NOTE
  printf '%s\t%s\t%s\t%s\n' "$@" | tee -a "$summary"
  [[ $2 == skipped ]] || ran=1
  [[ $2 == ok || $2 == skipped ]] || failures=1
}

# Pack everything found so far, in pieces below the size limit; results first, so that only logs are cut off.
# New pieces are written to a folder and then moved over the old ones: a full disk or a kill leaves a good archive.
pack() {
  local pieces piece new=$out/.$name.new
  rm -rf "$work"/pieces/* "$new"
  tar -C "$work" -cz results impls gpu-session |
    split --bytes="$file_bytes" --numeric-suffixes --suffix-length=2 - "$work/pieces/$name.tar.gz."
  pieces=("$work"/pieces/*)
  if ((${#pieces[@]} > files - 1)); then
    [[ $not_packed ]] || record pack failed 0 "more than $((files - 1)) files of $file_bytes bytes: all is in $work"
    not_packed=$work
    pieces=("${pieces[@]:0:files-1}")
  fi
  if mkdir "$new" && cp "${pieces[@]}" "$new" && cp "$summary" "$new/$name.summary.tsv"; then
    mv -f "$new"/* "$out"
    for piece in "$out/$name".tar.gz.*; do # pieces of an earlier, longer archive
      [[ -e $work/pieces/${piece##*/} ]] || rm -f "$piece"
    done
  else
    [[ $not_packed ]] || record pack failed 0 "cannot write to $out: all is in $work"
    not_packed=$work
  fi
  rm -rf "$new"
}

finish() {
  trap '' INT TERM
  pack
  [[ $not_packed ]] || rm -rf "$work"
}

interrupted() { # EXIT_CODE
  trap '' INT TERM
  if [[ $child ]]; then
    kill -KILL -- "-$child" 2>/dev/null # finished rows are on the disk already
    wait "$child" 2>/dev/null
    record "$current" interrupted $((SECONDS - began)) ""
  fi
  exit "$1"
}

trap finish EXIT
trap 'interrupted 143' TERM
trap 'interrupted 130' INT

skip() { record "$1" skipped 0 "$2"; } # NAME REASON

# step NAME SECONDS COMMAND...: run a command with a time limit and a log; {seconds} in it is its time.
step() {
  current=$1
  if [[ $stopped ]]; then skip "$current" "$stopped"; return; fi
  # The step's time, scaled, or the time left until the limit if that is shorter; below half of its time it is skipped.
  local seconds code took note
  seconds=$(awk -v own="$2" -v scale="$scale" -v left=$((limit - SECONDS - grace - kill_after)) \
    'BEGIN { own *= scale; own = own < 1 ? 1 : own; if (left >= own / 2) printf "%.2f", own < left ? own : left }')
  if [[ ! $seconds ]]; then skip "$current" "no time left"; return; fi
  shift 2
  began=$SECONDS
  timeout --signal=INT --kill-after="$kill_after" "$(awk "BEGIN { print $seconds + $grace }")" \
    "${@//\{seconds\}/$seconds}" >"$logs/$current.log" 2>&1 &
  child=$!
  wait "$child" 2>/dev/null
  code=$?
  kill -KILL -- "-$child" 2>/dev/null # processes that it started would disturb the next step
  child=
  took=$((SECONDS - began))
  note=$(tail -n 1 "$logs/$current.log" | tr '\t' ' ' | cut -c 1-200)
  if ((code == 0)); then
    record "$current" ok "$took" "$note"
  elif ((code == 124 || (code == 137 && took >= ${seconds%.*}))); then
    record "$current" timeout "$took" "$note"
  else
    record "$current" failed "$took" "exit code $code: $note"
  fi
  pack
  return "$code"
}

gpu() { if [[ $device == cuda ]]; then "$@"; else skip "$2" "needs a GPU"; fi; } # step|measure|tests NAME ...

measure() { # NAME SECONDS OPTIONS...: a stored run within this time
  step "$1" "$2" "$python" -m esbench run --device "$device" --results "$results" --budget "{seconds}" "${@:3}"
}

tests() { # NAME SECONDS MARKERS PYTEST_ARGUMENTS...: see "Tests on a GPU" in CONTRIBUTING.md
  step "$1" "$2" env OMP_NUM_THREADS=1 "$python" -m pytest -q -o addopts= -W default -m "$3 and not slow" "${@:4}"
}

graph=() eager=()
[[ $device == cuda ]] && graph=(--methods graph) eager=(--methods eager)

start() {
  step versions 10 bash -c '"$0" -VV; "$0" -m pip list' "$python"
  gpu step clocks 5 nvidia-smi -q
  if compgen -G "wheels/*.whl" >/dev/null; then
    step wheels 20 "$python" -m pip install --no-index --no-deps --no-compile --target "$work/site" wheels/*.whl
    export PYTHONPATH=$PYTHONPATH:$work/site
  fi
  step packages 5 "$python" -m esbench.wheels
  step doctor 15 "$python" -m esbench doctor
}

# The file of the table that tuning writes: outside the repository, so that it stays clean for later runs.
tuned_table() {
  local name
  [[ $device == cuda ]] || return
  name=$("$python" -c 'import torch, esbench.schema; print(esbench.schema.slug(torch.cuda.get_device_name()))')
  cp "$tuned/$name.json" "$work/$tuned" 2>/dev/null # tuning goes on from it
  echo "$work/$tuned/$name.json"
}

part1() {
  start
  # Without --budget: with it, a run that measures nothing could succeed.
  step smoke 40 "$python" -m esbench run --device "$device" --results "$results" --suite width \
    --cases "Linear(256, 256)*" --phases sample,forward,update \
    --variants Perturbed --variants "LowRank(rank=1)" --variants "FusedLowRank(rank=1)"
  (($? == 0 || $? == 3)) || stopped="the smoke run failed" # 3: disturbed by others, but it works
  gpu tests tests_alone 110 alone tests/gpu
  gpu measure members_1M 25 --suite unstored --variants FusedRegenerated --phases forward
  gpu tests tests_parallel 180 "not alone" -n 14 tests/gpu tests/kernels/launched
  gpu step tuning 170 "$python" -m impls.kernels.autotune --seconds "{seconds}" --out "$(tuned_table)"
}

part2() {
  start
  measure readme 270 --suite readme
  measure kernels 150 --suite kernels --variants "Fused*" --phases forward,update "${graph[@]}"
  measure binary 60 --suite binary
}

part3() {
  local scheme few=() # fewer variants, so that a sweep fits into its time
  for scheme in Perturbed "SparsePerturbed(k=1)" "LowRank(rank=1)" LowRankSign Orthogonal "Permuted(side=out)" \
    "Flipped(side=both)" Hadamard; do
    few+=(--variants "$scheme")
  done
  start
  measure width 120 --suite width "${graph[@]}" "${few[@]}"
  measure population 120 --suite population "${graph[@]}" "${few[@]}"
  measure quality 120 --suite quality "${eager[@]}" "${few[@]}"
  measure eager 90 --suite readme --phases sample,step "${eager[@]}"
}

case $part in
  [123]) "part$part" ;;
  *)
    # shellcheck source=/dev/null
    source "$part"
    ;;
esac
((ran)) || record session failed 0 "no step was run"
exit "$failures"
