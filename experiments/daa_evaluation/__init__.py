"""Dynamic Asymmetric Attention on language-model benchmarks, beside its base, ALiBi and prompting (daa, Table 2)."""
