"""The Hopper family: wgmma and TMA, sm_90a."""
