"""The README of an exported model."""

from lowcomm_node.export.choices import Weights
from lowcomm_node.export.contents import Contents
from lowcomm_node.system.units import clean


def card(contents: Contents) -> str:
    """Markdown that says what the model is, which run it comes from, and how to use it."""
    parameters = sum(tensor.numel() for tensor in contents.tensors.values())
    run_id = clean(str(contents.meta.get("run_id", "unknown")))[:64]
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [lowcomm]",
        "---",
        "",
        f"# {contents.name}",
        "",
        *_description(contents),
        "A language model that was trained with lowcomm by peers who exchanged small, coded pieces "
        "of it.",
        "",
        "| | |",
        "|---|---|",
        f"| parameters | {parameters:,} |",
        f"| context | {contents.settings.context:,} tokens |",
        f"| run | `{run_id}` |",
        f"| swarm step | {_number(contents.meta.get('swarm_step'))} |",
        f"| tokens that this node trained on | {_number(contents.meta.get('tokens'))} |",
        f"| weights | {_weights(contents)} of checkpoint {contents.step:,} |",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        "```",
        "",
        *_specification(contents),
    ]
    return "\n".join(lines)


def _description(contents: Contents) -> list[str]:
    told = contents.run.spec.run.description if contents.run else ""
    return [told, ""] if told else []


def _specification(contents: Contents) -> list[str]:
    if contents.run is None:
        return []
    document = contents.run.spec.model_dump_json(indent=2)
    return ["## Specification of the run", "", "```json", document, "```", ""]


def _weights(contents: Contents) -> str:
    if contents.weights is Weights.AVERAGE:
        return (
            f"the mean of the slow weights of this node and {len(contents.peers)} of its peers, as"
        )
    return f"{contents.weights.value} weights"


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "unknown"
