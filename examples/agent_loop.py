"""An agent that sends hints: when it returns, and when it is done.

    sglang serve MODEL --radix-eviction wa
    python examples/agent_loop.py http://127.0.0.1:30000 "Which leaf is evicted first?"

A hint changes which KV is kept, never an answer. Wrong hints are believed less and less.
"""

import sys
import time
import uuid

import httpx
from openai import OpenAI

TOOL_S = 0.2
"""How long this agent's tool takes; yours knows its own tools."""


def run_tool(question: str) -> str:
    time.sleep(TOOL_S)
    return f"The tool's answer to {question[:20]!r} is 42."


def main(url: str, task: str, steps: int = 3) -> list[str]:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    name = f"agent-{uuid.uuid4()}"
    messages = [
        {"role": "system", "content": "You are an agent. Use what the tool says."},
        {"role": "user", "content": task},
    ]
    answers = []
    for turn in range(1, steps + 1):
        hints = {"canopy_category": "agent", "canopy_conversation": name, "canopy_turn": turn}
        if turn < steps:
            hints["canopy_return_in_s"] = TOOL_S + 0.5
        reply = client.chat.completions.create(
            model=model, messages=messages, max_tokens=16, extra_body={"custom_params": hints}
        )
        answers.append(reply.choices[0].message.content or "")
        messages.append({"role": "assistant", "content": answers[-1]})
        messages.append({"role": "user", "content": run_tool(answers[-1])})
    # Nothing continues this conversation: its own KV may go first.
    hint = {"conversation": name, "over": True}
    httpx.post(f"{url}/canopy/hint", json=hint, timeout=60).raise_for_status()
    return answers


if __name__ == "__main__":
    for answer in main(sys.argv[1].rstrip("/"), " ".join(sys.argv[2:]) or "Which leaf goes first?"):
        print(answer)
