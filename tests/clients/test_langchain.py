"""langchain-openai in a short conversation."""

from __future__ import annotations

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

from tests.server.real import RealServer


def test_a_short_conversation(server: RealServer) -> None:
    chat = ChatOpenAI(model="tiny", base_url=server.url + "/v1", api_key="none", temperature=0, max_tokens=12)
    turns = [SystemMessage("Be brief."), HumanMessage("Who goes there?")]
    answer = chat.invoke(turns)
    assert isinstance(answer.content, str) and answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] <= 12
    assert "".join(str(chunk.content) for chunk in chat.stream(turns)) == answer.content
    following = chat.invoke([*turns, AIMessage(answer.content), HumanMessage("Pass.")])
    assert following.usage_metadata is not None
    assert following.usage_metadata["input_token_details"]["cache_read"] >= answer.usage_metadata["input_tokens"]


def test_a_completion(server: RealServer) -> None:
    model = OpenAI(model="tiny", base_url=server.url + "/v1", api_key="none", temperature=0, max_tokens=6)
    assert (
        model.invoke("Once")
        == server.post("/v1/completions", prompt="Once", temperature=0, max_tokens=6)["choices"][0]["text"]
    )
