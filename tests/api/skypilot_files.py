"""Service files as SkyPilot's users write them, and Listing 1 of SkyServe's paper, character by character."""

LISTING_1 = b"""\
service:
  # Readiness check endpoint.
  readiness_probe:
    path: /v1/chat/completions
  replica_policy:
    target_qps_per_replica: 1
    # Fields below describe SpotHedge.
    # Sec. 3.2, knob for over-provisioning.
    num_overprovision: 2
    # Sec. 3.2, dynamic on-demand fallback.
    dynamic_ondemand_fallback: true
    # Sec. 3.1, Placer that keeps track of
    # spot preemption and decide spot
    # replica placement.
    spot_placer: dynamic_fallback
  # Fields below describe each replica.
resources:
  ports: 8080
  accelerators: A100
  # Manually specify a subset of failure
  # domains. If not specified, all possible
  # failure domains are used.
  any_of:
    # Enable only one region in AWS.
    - cloud: aws
      region: us-east-1
    # Enable all region in GCP.
    - cloud: gcp
  # Dependencies.
  setup: pip install -r requirements.txt
  # Launch the server.
  run: python llm_server.py --port 8080
"""
HTTP_SERVER = b"""\
# SkyServe YAML to run an HTTP server.
name: HTTP_server
service:
  readiness_probe: /health
  replicas: 2
resources:
  ports: 8081
  cpus: 2+
workdir: {archive: 0000000000000000000000000000000000000000000000000000000000000000}
run: python3 server.py --port 8081
"""
VLLM = b"""\
name: vllm-mixtral
envs:
  MODEL_NAME: mistralai/Mixtral-8x7B-Instruct-v0.1
  MAX_LEN: 4096
  TEMPERATURE: 0.5
secrets:
  HF_TOKEN: null
service:
  readiness_probe:
    path: /v1/chat/completions
    post_data:
      model: $MODEL_NAME
      messages:
        - role: user
          content: Hello! What is your name?
      max_tokens: 1
    initial_delay_seconds: 1800
    endpoint_probe_interval_seconds: 10
  replica_policy:
    min_replicas: 1
    max_replicas: 3
    target_qps_per_replica: 5
    dynamic_ondemand_fallback: true
    base_ondemand_fallback_replicas: 1
    upscale_delay_seconds: 60
    downscale_delay_seconds: 600
  load_balancing_policy: least_load
resources:
  accelerators: {L4:8, A10g:8, A100:4, A100:8, A100-80GB:2}
  cpus: 32+
  memory: 128+
  use_spot: true
  ports: 8080
  disk_size: 512
  disk_tier: best
setup: |
  conda activate vllm
  if [ $? -ne 0 ]; then
    conda create -n vllm python=3.10 -y
    conda activate vllm
  fi
  pip install vllm
run: |
  conda activate vllm
  export PATH=$PATH:/sbin
  python -u -m vllm.entrypoints.openai.api_server --model $MODEL_NAME --port 8080 \\
    --tensor-parallel-size $SKYPILOT_NUM_GPUS_PER_NODE 2>&1 | tee api_server.log
"""
TGI = b"""\
service:
  readiness_probe: {path: /health, timeout_seconds: 30, headers: {Authorization: "Bearer ${API_KEY}"}}
  replicas: 3
envs: {MODEL_ID: lmsys/vicuna-13b-v1.5, API_KEY: abc}
resources:
  ordered:
    - {accelerators: "A100:1", infra: aws/us-east-1}
    - {accelerators: {L4: 2}, infra: "*/us-west1/us-west1-a"}
  ports: ["8082"]
  memory: 64
num_nodes: 1
run: |
  docker run --gpus all --shm-size 1g -p 8082:80 ghcr.io/huggingface/text-generation-inference --model-id $MODEL_ID
"""
