"""Machine providers, one package each (`capacity.provider.Provider`). See `docs/providers.md` to write a provider."""
