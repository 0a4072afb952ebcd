from trl import RLOOConfig, RLOOTrainer


def train(tokenizer, policy, ref_policy, reward_model, dataset):
    config = RLOOConfig(
        output_dir="out",
        rloo_k=4,
        kl_coef=0.05,
        response_length=53,
        total_episodes=10000,
        per_device_train_batch_size=16,
    )
    trainer = RLOOTrainer(
        config=config,
        processing_class=tokenizer,
        policy=policy,
        ref_policy=ref_policy,
        reward_model=reward_model,
        train_dataset=dataset,
    )
    trainer.train()
