"""openai and instructor with tools and schemas: python foreign_clients.py URL KEY.

A test runs this script in an environment of its own, whose warnings are not ours.
"""

import sys
from typing import Literal

import instructor
import openai
import pydantic


class Booking(pydantic.BaseModel, extra="forbid"):  # a small model would add keys without end
    city: Literal["Oslo", "Rome"]
    nights: Literal[1, 2, 3]


client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0)
settings = {"model": "moa-jax-demo", "max_tokens": 150, "seed": 3, "temperature": 0}
settings["messages"] = [{"role": "user", "content": "I need a cheap hotel."}]
parse, tools = client.chat.completions.parse, [openai.pydantic_function_tool(Booking)]
found = [parse(**settings, response_format=Booking).choices[0].message.parsed]
for choice in ("required", {"type": "function", "function": {"name": "Booking"}}):
    (call,) = parse(**settings, tools=tools, tool_choice=choice).choices[0].message.tool_calls
    found.append(call.function.parsed_arguments)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    create = instructor.from_openai(client, mode=mode).chat.completions.create
    found.append(create(**settings, response_model=Booking, max_retries=0))
assert all(isinstance(each, Booking) for each in found), found
