"""DSPy with its JSON adapter, which asks for a response format, against a gateway: `dspy_program.py TASK`."""

import os
import sys

import dspy

model = dspy.LM(
    "openai/policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], cache=False
)
dspy.configure(lm=model, adapter=dspy.JSONAdapter())
sys.stdout.write(str(dspy.Predict("question -> total: int")(question=sys.argv[1]).total))
