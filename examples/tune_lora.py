"""Fine-tune a tiny Llama with LoRA and record everything, without downloading anything.

    python examples/tune_lora.py --samples 200

Writes checkpoints to ./checkpoints, a run to ./runs, and report.html.
"""

from __future__ import annotations

import argparse

from sonde.tune import CheckpointAnalyzer, ModelConfig, TrainingWrapper, generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=400)
    samples = parser.parse_args().samples

    # To use a saved model:  TrainingWrapper(model_name="meta-llama/Llama-2-7b-hf", …)
    model = ModelConfig(
        architecture="llama",
        options={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    )
    wrapper = TrainingWrapper(
        model=model,
        training_method="lora",
        checkpoint_interval=10,
        learning_rate=5e-3,
        max_length=32,
        run={"project": "examples", "name": "tune-lora"},
    )
    wrapper.train(
        dataset=generate("counting", samples),
        output_dir="./checkpoints",
        num_epochs=1,
        eval_dataset=generate("counting", 40, seed=1),
    )

    report = CheckpointAnalyzer("./checkpoints").generate_standard_report(save_to="report.html")
    print(report.text)


if __name__ == "__main__":
    main()
