# Sourced by the scripts beside it: a queue of commands, run side by side with one thread each, every one of them once.
#
#   add NAME colar train ...   queues a command; its output goes to $out/NAME.log
#   run_all WHAT               runs the queue, $procs commands at a time, and leaves $out/NAME.done for each
#
# A command whose .done is there is skipped. The first that fails stops the rest. The script, run again, resumes there:
# colar's own commands resume in the middle.
procs=${PROCS:-$(python3 -c 'import os; print(os.cpu_count() or 1)')}
queue=()

say() { echo "$(date +%H:%M) $*" >&2; }

add() {
  local name=$1
  shift
  if [[ -e $out/$name.done ]]; then return; fi
  # One string per command, its words quoted: xargs starts a new shell for each, and arrays cannot be exported.
  queue+=("$(printf '%q ' "$out/$name" "$@")")
}

# Runs one command: $1 holds the path of its log without the ending, and its words, quoted.
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
  local queued=${#queue[@]}
  export out total=$(($(find "$out" -name '*.done' 2>/dev/null | wc -l) + queued))
  if ((queued == 0)); then return; fi
  say "$1: $queued to run, $procs at a time"
  printf '%s\0' "${queue[@]}" | xargs -0 -n 1 -P "$procs" bash -c 'run_one "$1"' run_one
  queue=()
}
