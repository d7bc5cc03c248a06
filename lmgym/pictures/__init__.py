"""Pictures in prompts: their ids and the folder that holds their files. No torch."""
