"""Command lines of public reports and deploy files, and what ``canopy doctor`` must answer.

``auto`` is added to each. Paths, addresses and long lists are shortened.
"""

from dataclasses import dataclass

OK, REFUSED, UNKNOWN = "starts", "refused", "unknown flags"
NO_EAGLE = "EAGLE is not supported in decode attention backend torch_native"
SGLANG = "https://github.com/sgl-project/sglang"
LAUNCH = "python3 -m sglang.launch_server"


@dataclass(frozen=True)
class Line:
    """One command line."""

    source: str
    command: str
    """A command, or the text of a YAML file."""
    expected: str = OK
    off: tuple[str, ...] = ()
    """Parts of ``auto`` that are off, the write policy apart."""
    said: str = ""
    """Part of the doctor's answer."""
    stops: str = ""
    """What SGLang itself stops for on a CPU."""


LINES = (
    Line(f"{SGLANG}/issues/2587", f"{LAUNCH} --model M --enable-dp-attention --tp 8 "
         "--trust-remote-code"),
    Line(f"{SGLANG}/issues/2587#docker", "docker run --gpus all --shm-size 32g -p 30000:30000 "
         "-v ~/.cache:/cache --env HF_TOKEN=hf_x --ipc=host "
         f"lmsysorg/sglang:latest {LAUNCH} --model M --enable-dp-attention --tp 8 "
         "--trust-remote-code --port 30000", said="through docker"),
    Line(f"{SGLANG}/issues/3658", "docker run --gpus all -d --entrypoint=python3 -e "
         "NCCL_IB_GID_INDEX=3 --network=host lmsysorg/sglang:v0.4.3-cu124 -m sglang.launch_server "
         "--model-path M --tp 16 --nccl-init-addr sgl-master:50001 --nnodes 2 --node-rank 0 "
         "--trust-remote-code --enable-dp-attention", said="several nodes"),
    Line(f"{SGLANG}/issues/2591", f"{LAUNCH} --model-path M --tp 14 --dist-init-addr "
         "10.21.99.116:5000 --nnodes 4 --node-rank 0 --trust-remote-code --enable-torch-compile "
         "--host 0.0.0.0 --port 30000 --grammar-backend xgrammar", said="several nodes"),
    Line(f"{SGLANG}/issues/2808", f"{LAUNCH} --model-path M --dist-init-addr 10.0.0.1:5000 "
         "--nnodes 2 --node-rank 0 --trust-remote-code --tp 16 --enable-dp-attention", said="several nodes"),
    Line(f"{SGLANG}/pull/5190", "python -m sglang.launch_server --model-path M --trust-remote-code "
         "--tp 16 --dp 16 --enable-dp-attention --enable-deepep-moe --deepep-mode normal "
         "--disable-cuda-graph --disable-radix-cache --nnodes 2 --node-rank 0", UNKNOWN,
         said="--enable-deepep-moe"),
    Line(f"{SGLANG}/issues/7041", f"SGL_ENABLE_JIT_DEEPGEMM=0 {LAUNCH} --model-path M --tp 8 "
         "--ep-size 8 --moe-dense-tp-size 1 --disable-cuda-graph --enable-dp-attention "
         "--dp-size 8", said="`--ep-size` above 1"),
    Line(f"{SGLANG}/issues/3506", f"CUDA_VISIBLE_DEVICES=5,6,7,8 {LAUNCH} --model-path M --tp 4 "
         "--host 0.0.0.0 --port 8000 --enable-dp-attention"),
    Line(f"{SGLANG}/issues/5491", "python -m sglang.launch_server --model M --served-model-name q "
         "--speculative-algorithm EAGLE --speculative-draft-model-path M --speculative-num-steps 3 "
         "--speculative-eagle-topk 2 --speculative-num-draft-tokens 8 --port 9123 "
         "--tensor-parallel-size 2 --mem-fraction-static 0.8 --max-running-requests 100",
         off=("order",), said="leave out --speculative-algorithm", stops=NO_EAGLE),
    Line(f"{SGLANG}/issues/11948", f"{LAUNCH} --model M --speculative-algorithm EAGLE3 "
         "--tensor-parallel-size 2 --speculative-draft-model-path M --speculative-num-steps 3 "
         "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --port 8000 --host 0.0.0.0 "
         "--cuda-graph-max-bs 128 --log-level info", UNKNOWN, said="--cuda-graph-max-bs"),
    Line("https://github.com/SafeAILab/EAGLE/issues/298", f"{LAUNCH} --model-path M "
         "--speculative-algorithm EAGLE3 --speculative-draft-model-path M --speculative-num-steps 6 "
         "--speculative-eagle-topk 10 --speculative-num-draft-tokens 32 --mem-fraction 0.9 "
         "--port 30000", off=("order",), stops=NO_EAGLE),
    Line("https://github.com/kvcache-ai/Mooncake/issues/854", f"{LAUNCH} --model-path M "
         "--port 30000 --disaggregation-ib-device mlx5_0,mlx5_1 --disaggregation-mode prefill "
         "--disaggregation-transfer-backend mooncake --tp-size 8 --page-size 16 --host 127.0.0.1 "
         "--trust-remote-code --moe-dense-tp-size 1 --mem-fraction-static 0.85 "
         "--chunked-prefill-size 32768 --moe-a2a-backend deepep --enable-hierarchical-cache "
         "--hicache-storage-backend mooncake", off=("order",), said="`--moe-a2a-backend`",
         stops="Please install mooncake"),
    Line(f"{SGLANG}/pull/7211", f"{LAUNCH} --model-path M --tp 8 --dp 8 "
         "--enable-hierarchical-cache --hicache-ratio 10 --hicache-write-policy write_back "
         "--hicache-io-backend direct --hicache-mem-layout layer_first "
         "--hicache-storage-backend mooncake", said="`--tp-size` above 2"),
    Line(f"{SGLANG}/issues/28396", f"SGLANG_ENABLE_UNIFIED_RADIX_TREE=1 {LAUNCH} --model-path M "
         "--served-model-name m --tp 8 --mem-fraction-static 0.8 "
         "--moe-runner-backend flashinfer_trtllm --trust-remote-code --enable-cache-report "
         "--enable-metrics --max-running-requests 48 --chunked-prefill-size 16384 --page-size 64 "
         "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
         "--speculative-num-draft-tokens 4 --enable-hierarchical-cache --hicache-size 190 "
         "--hicache-io-backend direct --hicache-mem-layout page_first_direct "
         "--hicache-storage-prefetch-policy timeout --hicache-storage-backend mooncake "
         "--schedule-policy lpm", off=("order",), said="--schedule-policy lpm was given",
         stops=NO_EAGLE),
    Line(f"{SGLANG}/pull/12114", f"{LAUNCH} --model M --tp 4 --page-size 64",
         said="pages of 64 tokens (device)"),
    Line(f"{SGLANG}/pull/13584", "python -m sglang.launch_server --model-path M "
         "--max-running-requests 16 --chunked-prefill-size 64"),
    Line(f"{SGLANG}/pull/11214", f"{LAUNCH} --model M --tp 4 --disable-radix-cache", REFUSED,
         said="--disable-radix-cache"),
    Line(f"{SGLANG}/pull/7216", f"{LAUNCH} --model-path M --lora-paths lora0=a/b lora1=c/d "
         "--max-loras-per-batch 2", said="LoRA adapters"),
    Line("https://github.com/marieai/marie-ai config/sglang/sglang-qwq-x8.sh", "docker run --gpus "
         "device=0,1 --shm-size 32g -p 8000:8000 -e OMP_NUM_THREADS=1 --ipc=host "
         f"lmsysorg/sglang:latest {LAUNCH} --model-path M --host 0.0.0.0 --port 8000 "
         "--trust-remote-code --attention-backend flashinfer --quantization fp8 --dp-size 4 --tp 2 "
         "--pp-size 1 --schedule-policy fcfs --schedule-conservativeness 0.1 "
         "--max-running-requests 64 --mem-fraction-static 0.7", said="quantised weights"),
    Line("https://github.com/marieai/marie-ai config/sglang/sglang-qwenvl_2_5_vl_adapter_no_lora.sh",
         "docker run --gpus device=0 -e PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True --ipc=host "
         f"lmsysorg/sglang:latest {LAUNCH} --model-path M --host 0.0.0.0 --port 8000 "
         "--trust-remote-code --attention-backend flashinfer --disable-radix-cache", REFUSED,
         said="--disable-radix-cache"),
    Line("https://docs.sglang.ai/backend/server_arguments.html",
         "python -m sglang.launch_server --model-path M --chunked-prefill-size 4096"),
    Line("https://docs.sglang.io/references/multi_node_deployment/rbg_pd/deepseekv32_pd.html",
         f"{LAUNCH} --model-path M --port 30000 --trust-remote --host 0.0.0.0 --disable-radix-cache "
         "--chunked-prefill-size 131072 --disaggregation-mode decode", REFUSED, said="decode"),
    Line(f"{SGLANG} docker/k8s-sglang-service.yaml", """
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      containers:
        - name: llama
          image: lmsysorg/sglang:latest
          command: ["python3", "-m", "sglang.launch_server"]
          args: ["--model-path", "M", "--host", "0.0.0.0", "--port", "30000", "AUTO"]
          env: [{name: HF_TOKEN, value: x}]
---
apiVersion: v1
kind: Service
spec: {ports: [{port: 30000}]}
""", said="starts through"),
    Line(f"{SGLANG} docker/compose.yaml", """
services:
  sglang:
    image: lmsysorg/sglang:latest
    environment: {HF_TOKEN: x}
    entrypoint: python3 -m sglang.launch_server
    command:
      --model-path M
      --host 0.0.0.0
      --port 30000
      AUTO
""", said="starts through"),
    Line(f"{SGLANG} docker/k8s-sglang-distributed-sts.yaml", """
apiVersion: apps/v1
kind: StatefulSet
spec:
  template:
    spec:
      containers:
      - name: sglang-container
        command: [/bin/bash, -c]
        args:
        - |
          python3 -m sglang.launch_server \\
          --model M \\
          --dist-init-addr sglang-master-pod:5000 \\
          --tensor-parallel-size 16 \\
          --nnodes 2 \\
          --node-rank 0 \\
          --trust-remote-code \\
          --enable-metrics \\
          --expert-parallel-size 16 AUTO
""", said="`--ep-size` above 1"),
)  # fmt: skip
