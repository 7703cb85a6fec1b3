"""Fifteen service files in the style of SkyPilot's documentation, each with a field that its users have.

`FILES` has them by name. `REFUSED` has those that mizzen refuses, with the path of the error: only hardware or an
engine that machines do not have would change that.
"""

FILES = {
    "http-server": """
service: {readiness_probe: /health, replicas: 2}
resources: {ports: 8081, cpus: 2+}
workdir: code
run: python3 server.py --port 8081
""",
    "vllm-secret": """
envs: {MODEL_NAME: meta-llama/Meta-Llama-3-8B-Instruct}
secrets: {HF_TOKEN: hf_abcdefghijklmnopqrst}
service:
  readiness_probe:
    path: /v1/chat/completions
    post_data: {model: $MODEL_NAME, messages: [{role: user, content: Hello!}], max_tokens: 1}
  replicas: 2
resources: {accelerators: {L4, A10g, A100:1}, ports: 8081, disk_size: 512, disk_tier: best}
setup: pip install vllm==0.5.1
run: vllm serve $MODEL_NAME --tensor-parallel-size $SKYPILOT_NUM_GPUS_PER_NODE --port 8081
""",
    "autoscaling-from-zero": """
service:
  readiness_probe: {path: /, initial_delay_seconds: 120}
  replica_policy:
    min_replicas: 0
    max_replicas: 3
    target_qps_per_replica: 2.5
    upscale_delay_seconds: 60
    downscale_delay_seconds: 300
  load_balancing_policy: round_robin
resources: {ports: 8080, cpus: 2+, memory: 4+}
run: python3 -m http.server 8080
""",
    "spot-hedge": """
service:
  readiness_probe: /health
  replica_policy:
    min_replicas: 2
    max_replicas: 5
    target_qps_per_replica: 3
    base_ondemand_fallback_replicas: 1
    dynamic_ondemand_fallback: true
    num_overprovision: 1
    spot_placer: dynamic_fallback
resources:
  ports: 8081
  accelerators: A100:1
  use_spot: true
  any_of: [{infra: aws/us-east-1}, {infra: gcp}]
run: python3 serve.py
""",
    "local-files": """
service: {readiness_probe: /health, replicas: 1}
resources: {ports: 8080, cpus: 2}
workdir: code
file_mounts:
  ~/.config/server/config.yaml: ./config.yaml
  prompts: ./prompts
  /data/config.yaml: config.yaml
run: python3 server.py --config ~/.config/server/config.yaml
""",
    "bucket-copy": """
service: {readiness_probe: /health, replicas: 1}
resources: {ports: 8080, accelerators: A100:1}
file_mounts:
  /model-weights: s3://my-models/llama-3-8b
  ~/tokenizer: {source: gs://my-tokenizers/llama, mode: COPY}
  /cache: {name: my-cache, store: s3}
run: vllm serve /model-weights --port 8080
""",
    "bucket-mount": """
service: {readiness_probe: /health, replicas: 1}
resources: {ports: 8080, accelerators: A100:1}
file_mounts:
  /checkpoints: {name: my-checkpoints, store: s3, mode: MOUNT}
run: python3 serve.py --model /checkpoints/last
""",
    "git": """
service: {readiness_probe: /health, replicas: 1}
resources: {ports: 8080, cpus: 2}
workdir: {url: "{repository}", ref: main}
run: python3 server.py
""",
    "docker": """
service: {readiness_probe: /health, replicas: 1}
resources:
  ports: 8000
  accelerators: A100:1
  image_id: docker:vllm/vllm-openai:v0.8.4
secrets: {HF_TOKEN: hf_abcdefghijklmnopqrst}
setup: python3 -c 'import vllm'
run: vllm serve Qwen/Qwen2.5-7B-Instruct --port 8000
""",
    "labels-and-config": """
name: labelled_service
service: {readiness_probe: /health, replicas: 1}
resources:
  ports: 8080
  cpus: 4+
  network_tier: best
  labels: {project: chat, owner: team-a}
config:
  kubernetes: {provision_timeout: 600}
run: python3 serve.py
""",
    "multi-node": """
service: {readiness_probe: {path: /health, initial_delay_seconds: 1800}, replicas: 1}
resources: {ports: 8081, accelerators: A100:1, memory: 16+}
num_nodes: 2
setup: pip install ray vllm
run: |
  head=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
  if [ "$SKYPILOT_NODE_RANK" = 0 ]; then ray start --head --port 6379 && vllm serve model --port 8081
  else ray start --address $head:6379 --block; fi
""",
    "auth": """
envs: {MODEL_NAME: model}
secrets: {AUTH_TOKEN: sk-0123456789abcdef}
service:
  readiness_probe: {path: /v1/models, headers: {Authorization: Bearer $AUTH_TOKEN}}
  replicas: 1
resources: {ports: 8000, accelerators: A100:1}
run: vllm serve $MODEL_NAME --port 8000 --api-key $AUTH_TOKEN
""",
    "qps-by-gpu": """
service:
  readiness_probe: /health
  load_balancing_policy: instance_aware_least_load
  replica_policy:
    min_replicas: 1
    max_replicas: 6
    target_qps_per_replica: {"A100:1": 2.5, "V100:1": 1.25}
resources: {ports: 8080, accelerators: {A100:1, V100:1}}
run: python3 serve.py
""",
    "https": """
service:
  readiness_probe: /
  tls: {keyfile: key.pem, certfile: cert.pem}
  replicas: 1
resources: {ports: 8080, cpus: 2}
run: python3 -m http.server 8080
""",
    "tpu": """
service: {readiness_probe: /health, replicas: 1}
resources:
  ports: 8080
  accelerators: tpu-v5e-4
  accelerator_args: {runtime_version: v2-alpha-tpuv5-lite}
run: python3 -m jetstream.server --port 8080
""",
}
REFUSED = {"bucket-mount": "file_mounts./checkpoints.mode", "tpu": "resources.accelerator_args"}
