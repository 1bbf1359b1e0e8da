"""Numbers to ink. Takes plain values; imports no other room of ours."""
