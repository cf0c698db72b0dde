# Sourced by the scripts beside it: commands side by side, one thread each, every one of them once.
#
#   add NAME colar train ...   puts a command in line; its output goes to $out/NAME.log
#   run_all WHAT               runs what is in line, $procs at a time, and leaves $out/NAME.done for each
#
# A command whose .done is there is skipped. The first that fails stops the rest; the script, run again, goes on there:
# colar's own commands resume in the middle.
procs=${PROCS:-$(python3 -c 'import os; print(os.cpu_count() or 1)')}
line=()

say() { echo "$(date +%H:%M) $*" >&2; }

add() {
  local name=$1
  shift
  if [[ ! -e $out/$name.done ]]; then line+=("$(printf '%q ' "$out/$name" "$@")"); fi
}

# One command: $1 holds the path of its log, less the ending, and its words, quoted.
run_one() {
  local words start=$SECONDS path
  eval "words=($1)"
  path=${words[0]}
  mkdir -p "$(dirname "$path")"
  OMP_NUM_THREADS=1 "${words[@]:1}" >"$path.log" 2>&1 || {
    say "failed: $path"
    tail -n 3 "$path.log" >&2
    return 255 # xargs starts no more
  }
  touch "$path.done"
  say "done: ${path#"$out"/}, $((SECONDS - start)) s, $(find "$out" -name '*.done' | wc -l) of $total"
}
export -f say run_one

run_all() {
  local waiting=${#line[@]}
  export out total=$(($(find "$out" -name '*.done' 2>/dev/null | wc -l) + waiting))
  if ((waiting == 0)); then return; fi
  say "$1: $waiting to run, $procs at a time"
  printf '%s\0' "${line[@]}" | xargs -0 -n 1 -P "$procs" bash -c 'run_one "$1"' run_one
  line=()
}
