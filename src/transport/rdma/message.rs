//! The message by which two NICs' queue pairs get to know each other, and its reply, which has the same form.

use serde_json::{Value, json};

use crate::metadata::excerpt;

/// A connection request or reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Message {
    /// `<server>@<device>` of the sender.
    pub local_path: String,
    /// That of the receiver, as the sender knows it.
    pub peer_path: String,
    /// LID of the sender's port; 0 on Ethernet.
    pub lid: u16,
    /// GID of the sender's port; empty from old peers.
    pub gid: String,
    /// Numbers of the sender's queue pairs.
    pub queue_pairs: Vec<u32>,
    /// Present if the sender knows the last step: the side that asked says that it is ready to receive. True if this is that step.
    pub ready_ack: Option<bool>,
    /// Why the request is rejected; empty if it is not.
    pub rejection: String,
}

impl Message {
    pub fn rejection(reason: String) -> Message {
        Message { rejection: reason, ..Message::default() }
    }

    pub fn to_json(&self) -> Value {
        let mut message = json!({
            "payload": "",
            "local_nic_path": self.local_path,
            "peer_nic_path": self.peer_path,
            "local_lid": self.lid,
            "local_gid": self.gid,
            "qp_num": self.queue_pairs,
            "reply_msg": self.rejection,
        });
        if let Some(ready_ack) = self.ready_ack {
            message["ready_ack"] = ready_ack.into();
        }
        message
    }

    /// What is missing is empty; what is of another type is an error, which names it.
    pub fn from_json(message: &Value) -> Result<Message, String> {
        let wrong = |key: &str| format!("\"{key}\" is not of its type: {}", excerpt(&message[key].to_string()));
        let text = |key: &str| match &message[key] {
            Value::Null => Ok(String::new()),
            Value::String(text) => Ok(text.clone()),
            _ => Err(wrong(key)),
        };
        let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
        let lid = match &message["local_lid"] {
            Value::Null => 0,
            lid => number(lid).and_then(|lid| u16::try_from(lid).ok()).ok_or_else(|| wrong("local_lid"))?,
        };
        let queue_pairs = match &message["qp_num"] {
            Value::Null => Vec::new(),
            Value::Array(numbers) => numbers.iter().map(number).collect::<Option<_>>().ok_or_else(|| wrong("qp_num"))?,
            _ => return Err(wrong("qp_num")),
        };
        let ready_ack = match message.get("ready_ack") {
            None | Some(Value::Null) => None,
            Some(Value::Bool(ready)) => Some(*ready),
            Some(_) => return Err(wrong("ready_ack")),
        };
        Ok(Message {
            local_path: text("local_nic_path")?,
            peer_path: text("peer_nic_path")?,
            lid,
            gid: text("local_gid")?,
            queue_pairs,
            ready_ack,
            rejection: text("reply_msg")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_upstreams_keys_and_come_back_as_they_were() {
        let message = Message {
            local_path: "10.0.0.1:15234@mlx5_0".into(),
            peer_path: "10.0.0.2:15777@mlx5_1".into(),
            lid: 7,
            gid: "00:01".into(),
            queue_pairs: vec![17, u32::MAX],
            ready_ack: Some(false),
            rejection: String::new(),
        };
        let json = message.to_json();
        let expected = json!({"local_gid": "00:01", "local_lid": 7, "local_nic_path": "10.0.0.1:15234@mlx5_0", "payload": "",
            "peer_nic_path": "10.0.0.2:15777@mlx5_1", "qp_num": [17, 4294967295u32], "ready_ack": false, "reply_msg": ""});
        assert_eq!(json, expected);
        assert_eq!(Message::from_json(&json), Ok(message.clone()));
        let legacy = Message { ready_ack: None, ..message };
        assert_eq!(legacy.to_json().get("ready_ack"), None);
        assert_eq!(Message::from_json(&json!({})), Ok(Message::default()));
    }

    #[test]
    fn members_of_other_types_are_named() {
        for (key, value) in [
            ("local_nic_path", json!(1)),
            ("peer_nic_path", json!([])),
            ("local_lid", json!(65536)),
            ("local_lid", json!("0")),
            ("local_gid", json!({})),
            ("qp_num", json!(5)),
            ("qp_num", json!([1, -1])),
            ("qp_num", json!([4294967296u64])),
            ("ready_ack", json!("yes")),
            ("reply_msg", json!(false)),
        ] {
            assert!(Message::from_json(&json!({key: value})).unwrap_err().contains(key), "{key}");
        }
    }
}
