//! `x-kubernetes-validations`: CEL rules of a schema, compiled with it and run on every write.
//!
//! The language is CEL with Kubernetes' libraries. Evaluation is bounded: per rule and per object by the cost limits that
//! kube-apiserver has, so that no rule can hold a server. Static typing is lighter than CEL's: undeclared names, functions
//! and fields are compile errors, other type errors surface when the rule runs.

mod ast;
mod check;
mod comprehension;
mod eval;
mod functions;
mod lex;
mod operators;
mod parse;
mod rules;
mod value;

pub(crate) use rules::RuleTree;

#[cfg(test)]
mod tests;
