"""Tokens by their numbers: two tokens can have the same text, and some have none of their own."""


class TokenNumbers:
    """Calls tokens `token_id:5`, as vLLM does with `return_tokens_as_token_ids`."""

    def token_text(self, token: int) -> str:
        return f"token_id:{token}"
