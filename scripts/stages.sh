# Sourced by the scripts that train the small models: stages of a training that can be continued.
# Needs $work (folder of all stages), $config (YAML file), and .venv.
mkdir -p "$work"
export JAX_PLATFORMS=cpu

run() {  # run DEVICES MODULE FROM [key=value ...]: a command on the model in $work/FROM
  local devices=$1 module=$2 from=$3
  shift 3
  XLA_FLAGS=--xla_force_host_platform_device_count=$devices \
    .venv/bin/python -m "maxdiffusion.$module" "$config" ici_data_parallelism="$devices" \
    pretrained_model_name_or_path="$work/$from" jax_cache_dir="$work/compiled" "$@"
}

stage() {  # stage DEVICES NAME MODULE FROM [key=value ...]: trains $work/FROM into $work/NAME, once
  local devices=$1 name=$2 module=$3 from=$4
  shift 4
  if [ -e "$work/$name/model_index.json" ]; then
    echo "stage $name: done before"
    return
  fi
  echo "stage $name: $(date +%T)"
  run "$devices" "$module" "$from" export_dir="$work/$name" \
    checkpoint_dir="$work/$name-checkpoints" metrics_file="$work/$name.jsonl" \
    output_dir="$work/$name-samples" "$@"
}
