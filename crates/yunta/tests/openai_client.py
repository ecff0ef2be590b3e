"""The official client against a served SmolLM2. Usage: openai_client.py URL"""

import concurrent.futures
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0, timeout=120)
MODEL = "smollm2"
QUESTION = [{"role": "user", "content": "What is the capital of Spain?"}]


def chat(**options):
    options = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 16, **options}
    return client.chat.completions.create(**options)


def models():
    assert MODEL in [m.id for m in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def whole_answer():
    answer = chat()
    # The tokens that the reference implementation's chat in fixtures/real starts with.
    assert answer.choices[0].message.content.startswith("El Salvador"), answer
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == 37 and answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == 53


def streamed_answer():
    whole = chat().choices[0].message.content
    pieces, reasons, usage = [], [], None
    for chunk in chat(stream=True, stream_options={"include_usage": True}):
        if chunk.choices:
            pieces.append(chunk.choices[0].delta.content or "")
            reasons.append(chunk.choices[0].finish_reason)
        usage = chunk.usage or usage
    assert "".join(pieces) == whole, (pieces, whole)
    assert len([p for p in pieces if p]) > 5, "it came in pieces"
    assert [r for r in reasons if r] == ["length"]
    assert usage.completion_tokens == 16


def stop_strings():
    answer = chat(max_tokens=60, stop=["capital", "nowhere"])
    assert "capital" not in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    streamed = "".join(
        c.choices[0].delta.content or "" for c in chat(max_tokens=60, stop="capital", stream=True)
    )
    assert streamed == answer.choices[0].message.content


def log_probabilities():
    answer = chat(max_tokens=4, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == 4
    for entry in content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"
        assert bytes(entry.bytes).decode() == entry.token
    completion = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=1, temperature=0, logprobs=2
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs.tokens == [" Paris"], logprobs
    # Reference (llama.cpp, fixtures/real): -0.2589.
    assert abs(logprobs.token_logprobs[0] + 0.2589) < 0.15, logprobs


def sampling_is_seeded():
    def draw(seed):
        return chat(temperature=1.2, top_p=0.95, seed=seed).choices[0].message.content

    assert draw(7) == draw(7)
    assert len({draw(seed) for seed in range(4)}) > 1
    narrow = chat(temperature=1.5, extra_body={"top_k": 1}).choices[0].message.content
    assert narrow == chat().choices[0].message.content
    tight = chat(temperature=0.1, extra_body={"min_p": 0.99}).choices[0].message.content
    assert tight == narrow


def several_choices():
    answer = chat(n=3, temperature=1.0, seed=1)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert len({c.message.content for c in answer.choices}) > 1
    assert answer.usage.completion_tokens == 48


def several_requests_at_once():
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: chat().choices[0].message.content, range(6)))
    assert len(set(answers)) == 1, "greedy answers do not depend on what runs beside them"


def tools_are_taken():
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    assert chat(tools=[tool], max_tokens=4).choices[0].message.content


def errors_have_the_right_shape():
    def fails(kind, **options):
        try:
            chat(**options)
        except kind as e:
            assert e.body["message"], e.body
            return e
        raise AssertionError(f"no {kind.__name__} for {options}")

    fails(openai.NotFoundError, model="gpt-17")
    assert fails(openai.BadRequestError, temperature=-1).param == "temperature"
    assert fails(openai.BadRequestError, max_tokens=0).param == "max_tokens"
    fails(openai.BadRequestError, messages=[])
    long = [{"role": "user", "content": "word " * 20_000}]
    assert fails(openai.BadRequestError, messages=long).code == "context_length_exceeded"


for test in [
    models,
    whole_answer,
    streamed_answer,
    stop_strings,
    log_probabilities,
    sampling_is_seeded,
    several_choices,
    several_requests_at_once,
    tools_are_taken,
    errors_have_the_right_shape,
]:
    test()
    print("ok", test.__name__)
