"""An agent that writes Python and runs it in a sandbox, until it works.

The model is whatever turns a conversation into code. A scripted one stands in for it here, so that this runs without a key: its first
program has a mistake, and it mends it when it sees the error. Put the call to your own model in its place.
"""

from k8s_agent_sandbox import SandboxClient

POOL = "python-warmpool"
ATTEMPTS = 3


def scripted_model(conversation):
    """What a model would answer to this conversation."""
    if any("ZeroDivisionError" in message for message in conversation):
        return "values = []\nprint(sum(values) / len(values) if values else 0.0)"
    return "values = []\nprint(sum(values) / len(values))"


def execute_python(sandbox, code):
    """Runs a program in the sandbox. A framework that takes functions as tools can be given this one, with the sandbox bound."""
    sandbox.files.write("program.py", code)
    return sandbox.commands.run("python3 program.py", timeout=30)


def solve(task, model, sandbox):
    """Lets the model try until its program ends well; what it printed, or nothing."""
    conversation = [task]
    for attempt in range(1, ATTEMPTS + 1):
        code = model(conversation)
        result = execute_python(sandbox, code)
        if result.exit_code == 0:
            print(f"attempt {attempt}: {result.stdout.strip()}")
            return result.stdout
        error = (result.stderr.strip() or f"exit code {result.exit_code}").splitlines()[-1]
        print(f"attempt {attempt}: {error}")
        conversation += [code, error]
    return None


def main():
    with SandboxClient() as client:
        sandbox = client.create_sandbox(warmpool=POOL)
        try:
            solve("Print the average of an empty list.", scripted_model, sandbox)
        finally:
            sandbox.terminate()


if __name__ == "__main__":
    main()
