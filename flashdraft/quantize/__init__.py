"""The command `flashdraft quantize`: the target's answers, their statistics through ../quant, and what the draft loses."""
