# Sourced by the scripts of reinforcement beside it, which set out, results and perhaps committed: what they share.
#
#   train NAME-SEED RECIPE [OVERRIDES...]   queues a training of lab/recipes/tiny/RECIPE.yaml
#   alone NAME-SEED FROM LABEL [OVERRIDES]  queues 20 updates with stops and tokens fixed: thoughts alone explore
#   answer NAME...                          queues the test questions for these models of all seeds; cot* have no c
#   write_results TITLE                     the report, the paired differences, the curves and all answers, in $results
#
#   SEEDS="0 1 2" PROCS=2 LIMIT=1000        training seeds, commands at a time (one thread each), test questions
#   EXTRA="--training.max_steps 3"          more overrides, of every training: to see whether it all runs
read -ra seeds <<<"${SEEDS:-0 1 2}"
limit=${LIMIT:-1000}
read -ra extra <<<"${EXTRA:-}"
factor=2
tests=()
source lab/reproduce/jobs.sh

train() {
  local name=$1 recipe=$2
  shift 2
  add "$name" colar train "lab/recipes/tiny/$recipe.yaml" --output "$out/$name" --training.seed "${name##*-}" "$@" ${extra[@]+"${extra[@]}"}
}

alone() {
  train "$1" grpo --model.init_from "$out/$2-${1##*-}/best" --label "$3" \
    --grpo.temperature 0.0001 --grpo.dynamic_sampling 0 --training.max_steps 20 --training.logging_steps 1 "${@:4}"
}

answer() {
  local s name method asked
  for s in "${seeds[@]}"; do
    for name in "$@"; do
      method=colar asked=(--compression_factor "$factor")
      if [[ $name == cot* ]]; then method=cot asked=(); fi
      if [[ $name == seq* ]]; then method=sequential; fi
      add "test/$name-$s" colar evaluate "$method=$out/$name-$s/best" --data arithmetic --limit "$limit" \
        ${asked[@]+"${asked[@]}"} --decoding greedy sampled --seeds 0 1 2 \
        --max_latents 96 --max_completion_length 8 --batch_size 128 --output "$out/test/$name-$s"
      tests+=("$out/test/$name-$s")
    done
  done
}

write_results() {
  local beside=()
  if [[ -n ${committed:-} ]]; then beside=("$committed"); fi
  colar report "${tests[@]}" ${beside[@]+"${beside[@]}"} --output "$results" --title "$1"
  python lab/scripts/grpo_report.py "$out" --seeds "${seeds[@]}" ${beside[@]+--committed "${beside[@]}"} --output "$results"
  {
    if [[ -n ${committed:-} ]]; then gzip -dc "$committed"; fi
    cat "${tests[@]/%//records.jsonl}"
  } | gzip -9n >"$results/records.jsonl.gz"
  echo "table        $results/report.md"
  echo "differences  $results/differences.md"
  echo "curves       $results/curves.png"
}
