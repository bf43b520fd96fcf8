"""Hides passwords and tokens in text that is printed, sent or stored."""

import os
import re

HIDDEN = "***"
SHORTEST = 8  # characters; a shorter value of an environment variable does not count as a secret
VARIABLE = re.compile(  # names such as HF_TOKEN and AWS_SECRET_ACCESS_KEY
    r"(token|(api|access|secret|account|private)_?key|secret|passw(or)?d|_pwd|credentials?)$", re.IGNORECASE
)
SECRET = re.compile(
    r"(?<=://)[^/\s@]+(?=@)"  # user and password in an address
    # a parameter in an address that holds a token, or signs it for S3, Google or Azure
    r"|(?<=[?&])(?:x-(?:amz|goog)-[a-z-]+|sig|signature|[\w-]*(?:token|key|secret|passw(?:or)?d))=[^&#\s]+"
    # tokens of Hugging Face, W&B, GitHub, GitLab, AWS, Google, OpenAI and Slack
    r"|\b(?:hf_|wandb_v\d_|gh[opsu]_|github_pat_|glpat-|sk-|xox[abprs]-)[\w-]{20,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\bAIza[\w-]{35}",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """``text`` without anything that looks like a secret, and without the values of variables named like one."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and VARIABLE.search(name):
            text = text.replace(value, HIDDEN)
    return SECRET.sub(HIDDEN, text)
