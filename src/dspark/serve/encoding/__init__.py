"""A model's chat format: messages to a prompt, and the reply's text to reasoning, content and tool calls."""

from dspark.serve.encoding.choose import chat_encoding
from dspark.serve.encoding.protocol import ChatEncoding, PromptPiece, ReplyDelta, ReplyParser, ToolCallDelta
from dspark.serve.encoding.token_ids import piece_ids

__all__ = ["ChatEncoding", "PromptPiece", "ReplyDelta", "ReplyParser", "ToolCallDelta", "chat_encoding", "piece_ids"]
