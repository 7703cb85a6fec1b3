"""Machine providers, one package each (`capacity.providers.Provider`). See `docs/providers.md` to write a provider."""
