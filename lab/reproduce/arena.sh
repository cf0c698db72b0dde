# Sourced by the scripts beside it that train at the arena's scale, with a name for their folder and their own arguments:
#
#   source lab/reproduce/arena.sh NAME [--smoke] [OUTPUT]
#
# --smoke: two updates of each, 8 questions; to see that all of it works. SEEDS="0" are other training seeds (0 1 2). PROCS=2 runs so
# many jobs at once. ARENA (runs/arena) is what table1.sh left: CoT weights are taken from there where they are.
limit=500 seeds=(${SEEDS:-0 1 2}) out=runs/$1 arena=${ARENA:-runs/arena} less=()
shift
if [[ ${1:-} == --smoke ]]; then
  shift
  limit=8 seeds=(${SEEDS:-0}) out=$out-smoke arena=${ARENA:-runs/arena-smoke}
  less=(--data.train_size 32 --data.train_skip 0 --data.validation_size 4 --training.max_steps 2)
fi
out=${1:-$out}
source lab/reproduce/jobs.sh

# Bigger numbers, as GSM-Hard has; shorter problems, as SVAMP; other wording, as MultiArith.
sets=(--data arithmetic arithmetic-hard=arithmetic arithmetic-short=arithmetic arithmetic-worded=arithmetic
  --options 'arithmetic.steps=[2,4]' arithmetic-hard.max_number=20 'arithmetic-short.steps=[2,2]'
  arithmetic-worded.wording=run_on --limit "$limit" --max_completion_length 8 --batch_size 250 --max_latents 64)

train() { # FOLDER RECIPE SEED OVERRIDE...: queues a training of lab/recipes/arena/RECIPE.yaml
  add "$1" colar train "lab/recipes/arena/$2.yaml" --output "$out/$1" --training.seed "$3" "${@:4}" ${less[@]+"${less[@]}"}
}

trained() { # NAME SEED: where that model of table1.sh is, or will be
  if [[ -e $arena/seed$2/$1.done ]]; then echo "$arena/seed$2/$1"; else echo "$out/seed$2/$1"; fi
}

train_missing() { # NAME SEED OVERRIDE...: queues a training of an arena recipe that table1.sh has not done
  if [[ $(trained "$1" "$2") == "$out"/* ]]; then train "seed$2/$1" "$1" "$2" "${@:3}"; fi
}

pairs=()
pair() { # SYSTEM BASELINE...: differences of the report, each by its name in the tables
  local other
  for other in "${@:2}"; do pairs+=(--pair "$1" "$other"); done
}
